"""The executor that runs steps in this process, and how it comes to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from engine import hardware
from engine.config import EngineConfig, ModelFacts, ResolvedConfig, resolve
from engine.core.plan import KVCapacity, SchedulerOutput, SeqId, StepResult
from engine.errors import ConfigError
from engine.executor import Executor, Ticket
from engine.models.config import ModelConfig, kv_groups, num_parameters
from engine.models.decoder import Decoder, Workspace
from engine.models.loader import OpenedModel, load_weights, open_model
from engine.models.requantize import label, requantized
from engine.runner.copy_cost import PROBE_TOKENS, measure_copy_costs
from engine.runner.kv_memory import KVMemory, plan_kv_memory
from engine.runner.model_runner import ModelRunner
from engine.types import EngineInfo, LoadProgress
from kernels.interface import DType, KernelSet
from kernels.select import select

Report = Callable[[LoadProgress], None]

_WEIGHTS_DONE = 0.9  # of the start; the rest is KV memory and a first step
_UNMEASURED = 1 << 60  # a GPU's memory is known once there is a context on it


class LocalExecutor(Executor):
    """Runs each step when it is submitted; collect() hands out what came of it."""

    def __init__(self, runner: ModelRunner, kernels: KernelSet, capacity: KVCapacity) -> None:
        self._runner = runner
        self._kernels = kernels
        self._capacity = capacity
        self._results: dict[int, StepResult] = {}

    def capacity(self) -> KVCapacity:
        return self._capacity

    def submit(self, output: SchedulerOutput, *, timed: bool = False) -> Ticket:
        self._results[output.step_id] = self._runner.execute(output, timed=timed)
        return Ticket(output.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket.step_id)

    def forget(self, seq_ids: Sequence[SeqId]) -> None:
        self._runner.forget(seq_ids)

    def close(self) -> None:
        self._results.clear()
        self._kernels.close()


def build_executor(config: EngineConfig, report: Report) -> tuple[Executor, EngineInfo]:
    """Load the model and make it ready for steps.

    Raises ModelError when the model's files cannot be served, ConfigError when the configuration cannot work.
    """
    report(LoadProgress("opening the model", 0.0))
    files = open_model(Path(config.model), config.load_format)
    # the files are about the least that the weights will take, so this context is the most that can fit
    file_bytes = 0 if files.source is None else files.source.total_bytes
    expected = resolve(config, _facts(files.config, files.config.context_length, file_bytes), _machine(_UNMEASURED))
    kernels = _select_kernels(expected)
    weights = load_weights(
        files,
        kernels,
        lambda done, total: report(LoadProgress("reading weights", _WEIGHTS_DONE * done / max(1, total))),
        convert=lambda read: requantized(read, config.quantization, config.quantization_group, DType(expected.dtype)),
    )
    workspace = Workspace(files.config, kernels, expected.max_num_batched_tokens)
    report(LoadProgress("reserving KV memory", _WEIGHTS_DONE))
    facts = _facts(files.config, expected.max_model_len, weight_bytes=0)
    resolved = resolve(config, facts, _machine(kernels.device_memory_available_bytes()))
    # what is left by now decides the context, and the context decides the rotations
    decoder = Decoder(files.config, weights, kernels, workspace, resolved.max_model_len)
    memory = plan_kv_memory(resolved, decoder.kv_groups, kernels)
    kv_caches = [kernels.new_kv_cache(spec) for spec in memory.specs]
    host_kv_caches = [kernels.new_host_kv_cache(spec) for spec in memory.host_specs]
    runner = ModelRunner(
        kernels,
        decoder,
        kv_caches,
        host_kv_caches=host_kv_caches,
        block_size=resolved.block_size,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_num_seqs=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
    )
    runner.warm_up()
    copy_costs = [0] * len(kv_caches)
    if host_kv_caches:
        num_tokens = min(PROBE_TOKENS, resolved.max_num_batched_tokens, resolved.max_model_len)
        copy_costs = measure_copy_costs(kernels, runner, kv_caches, host_kv_caches, num_tokens)
    executor = LocalExecutor(runner, kernels, memory.capacity(copy_costs))
    return executor, _info(config, files, resolved, kernels, memory)


def _machine(device_memory_bytes: int | None) -> hardware.Hardware:
    return replace(hardware.detect(), device_memory_available_bytes=device_memory_bytes)


def _facts(config: ModelConfig, context_length: int, weight_bytes: int) -> ModelFacts:
    groups = kv_groups(config)
    return ModelFacts(
        context_length,
        weight_bytes,
        kv_values_per_token=sum(2 * len(group.layers) * group.num_kv_heads * group.head_dim for group in groups),
        kv_vectors_per_token=sum(2 * len(group.layers) * group.num_kv_heads for group in groups),
    )


def _select_kernels(resolved: ResolvedConfig) -> KernelSet:
    try:
        return select(resolved.device, DType(resolved.dtype), resolved.kernels, resolved.num_threads)
    except ValueError as error:
        raise ConfigError(f"--kernels {resolved.kernels}: {error}") from error


def _info(
    config: EngineConfig, files: OpenedModel, resolved: ResolvedConfig, kernels: KernelSet, memory: KVMemory
) -> EngineInfo:
    formats = {} if files.source is None else files.source.formats()
    main_format = max(formats, key=formats.__getitem__) if formats else "dummy"
    return EngineInfo(
        architecture=files.config.architecture,
        num_parameters=num_parameters(files.config) if files.source is None else files.source.num_elements,
        vocab_size=files.config.vocab_size,
        max_model_len=resolved.max_model_len,
        block_size=resolved.block_size,
        num_kv_blocks=memory.num_usable_blocks,
        kv_capacity_tokens=memory.capacity_tokens,
        kv_cache_bytes=memory.total_bytes,
        host_kv_cache_bytes=memory.host_bytes,
        kv_bytes_per_token=sum(memory.block_bytes) // resolved.block_size,
        weight_bytes=kernels.weight_bytes(),
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_num_seqs=resolved.max_num_seqs,
        device=resolved.device,
        kernels=kernels.description,
        dtype=resolved.dtype,
        kv_cache_dtype=memory.specs[0].dtype.value,
        quantization=label(config.quantization, config.quantization_group, main_format, resolved.dtype),
        num_threads=resolved.num_threads,
        hidden_size=files.config.hidden_size,
    )
