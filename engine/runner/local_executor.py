"""The executor that runs steps in this process, and how it comes to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from engine import hardware
from engine.config import EngineConfig, ModelFacts, ResolvedConfig, resolve
from engine.constraints.grammars import GrammarStore
from engine.constraints.matching import Constraints
from engine.core.plan import KVCapacity, SchedulerOutput, SeqId, StepResult
from engine.core.step_cost import StepCost
from engine.errors import ConfigError
from engine.executor import Executor, Ticket
from engine.models.config import ModelConfig, kv_groups, num_parameters
from engine.models.decoder import Decoder, Workspace
from engine.models.serving_files import ServingFiles, WeightForm
from engine.runner.copy_cost import PROBE_TOKENS, measure_copy_costs
from engine.runner.kv_memory import KVMemory, plan_kv_memory
from engine.runner.model_runner import ModelRunner
from engine.runner.step_timing import measure_step_cost
from engine.types import EngineInfo, LoadProgress
from kernels.interface import DType, KernelSet
from kernels.select import select

Report = Callable[[LoadProgress], None]

_WEIGHTS_DONE = 0.9  # of the start; the rest is KV memory and a first step …
_KV_DONE = 0.95  # … and measuring what steps take
_UNMEASURED = 1 << 60  # a GPU's memory is known once there is a context on it


class LocalExecutor(Executor):
    """Runs each step when it is submitted; collect() hands out what came of it."""

    def __init__(
        self,
        runner: ModelRunner,
        kernels: KernelSet,
        capacity: KVCapacity,
        constraints: Constraints,
        cost: StepCost | None = None,
    ) -> None:
        self._runner = runner
        self._constraints = constraints
        self._kernels = kernels
        self._capacity = capacity
        self._cost = cost
        self._results: dict[int, StepResult] = {}

    def capacity(self) -> KVCapacity:
        return self._capacity

    def step_cost(self) -> StepCost | None:
        return self._cost

    def submit(self, output: SchedulerOutput, *, timed: bool = False) -> Ticket:
        self._results[output.step_id] = self._runner.execute(output, timed=timed)
        return Ticket(output.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket.step_id)

    def forget(self, seq_ids: Sequence[SeqId]) -> None:
        self._runner.forget(seq_ids)

    def close(self) -> None:
        self._results.clear()
        self._constraints.close()
        self._kernels.close()


def build_executor(
    config: EngineConfig, report: Report, grammars: GrammarStore | None = None
) -> tuple[Executor, EngineInfo]:
    """Load the model and make it ready for steps. Without `grammars` no request may have a constraint.

    Raises ModelError when the model's files cannot be served, ConfigError when the configuration cannot work.
    """
    report(LoadProgress("opening the model", 0.0))
    cache_folder = None if config.packed_cache_dir is None else Path(config.packed_cache_dir)
    files = ServingFiles(Path(config.model), config.load_format, cache_folder)
    # the files are about the least that the weights will take, so this context is the most that can fit
    file_bytes = 0 if files.facts is None else files.facts.total_bytes
    expected = resolve(config, _facts(files.config, files.config.context_length, file_bytes), _machine(_UNMEASURED))
    kernels = _select_kernels(expected)
    form = WeightForm(config.quantization, config.quantization_group, DType(expected.dtype))
    loaded = files.load(
        kernels,
        form,
        expected.num_threads,
        lambda done, total: report(LoadProgress("reading weights", _WEIGHTS_DONE * done / max(1, total))),
    )
    workspace = Workspace(files.config, kernels, expected.max_num_batched_tokens)
    report(LoadProgress("reserving KV memory", _WEIGHTS_DONE))
    facts = _facts(files.config, expected.max_model_len, loaded.mapped_bytes)
    resolved = resolve(config, facts, _machine(kernels.device_memory_available_bytes()))
    # what is left by now decides the context, and the context decides the rotations
    decoder = Decoder(files.config, loaded.weights, kernels, workspace, resolved.max_model_len)
    memory = plan_kv_memory(resolved, decoder.kv_groups, kernels)
    kv_caches = [kernels.new_kv_cache(spec) for spec in memory.specs]
    host_kv_caches = [kernels.new_host_kv_cache(spec) for spec in memory.host_specs]
    constraints = Constraints(
        GrammarStore() if grammars is None else grammars,
        files.config.vocab_size,
        resolved.max_num_seqs,
        fast_forward=config.fast_forward,
        num_threads=resolved.num_threads,
    )
    runner = ModelRunner(
        kernels,
        decoder,
        kv_caches,
        host_kv_caches=host_kv_caches,
        block_size=resolved.block_size,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_num_seqs=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
        constraints=constraints,
    )
    runner.warm_up()
    copy_costs = [0] * len(kv_caches)
    if host_kv_caches:
        num_tokens = min(PROBE_TOKENS, resolved.max_num_batched_tokens, resolved.max_model_len)
        copy_costs = measure_copy_costs(kernels, runner, kv_caches, host_kv_caches, num_tokens)
    cost = None
    if resolved.max_step_ms is not None:
        report(LoadProgress("measuring steps", _KV_DONE))
        limits = resolved.max_num_batched_tokens, resolved.max_model_len
        cost = measure_step_cost(kernels, runner, resolved.max_step_ms / 1000, *limits)
    executor = LocalExecutor(runner, kernels, memory.capacity(copy_costs), constraints, cost)
    return executor, _info(files, form, resolved, kernels, memory, cost)


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
        return select(
            resolved.device, DType(resolved.dtype), resolved.kernels, resolved.num_threads, resolved.batch_invariant
        )
    except ValueError as error:
        raise ConfigError(f"--kernels {resolved.kernels}: {error}") from error


def _info(
    files: ServingFiles,
    form: WeightForm,
    resolved: ResolvedConfig,
    kernels: KernelSet,
    memory: KVMemory,
    cost: StepCost | None,
) -> EngineInfo:
    return EngineInfo(
        architecture=files.config.architecture,
        num_parameters=num_parameters(files.config) if files.facts is None else files.facts.num_elements,
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
        quantization=form.label(files.facts),
        num_threads=resolved.num_threads,
        hidden_size=files.config.hidden_size,
        max_step_ms=0 if cost is None else resolved.max_step_ms or 0,
        step_prompt_tokens=0
        if cost is None
        else min(cost.fitting(0, cost.for_chunks([])), resolved.max_num_batched_tokens),
    )
