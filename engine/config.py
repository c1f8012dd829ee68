"""The engine's configuration: what was asked for (EngineConfig) and what it comes to here (ResolvedConfig).

`resolve` is pure: configuration, model and machine in, a new frozen object out; nothing is assigned later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.errors import ConfigError
from engine.hardware import Hardware
from engine.models.quantization import Quantization

KV_SHARE_HOST = 0.25  # of the host memory left after the weights: other programs live here too
KV_SHARE_DEVICE = 0.9  # of the GPU memory left after weights and activations: nobody else does
KV_SHARE_MOST = 0.9  # of what is left, to reach one full context
HOST_KV_BYTES = 4 << 30  # beside a GPU, for blocks that have to leave it, and at most
HOST_KV_SHARE = 0.25  # of the host memory that is left

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "int8": 1}
KV_SCALE_BYTES = 4  # an 8-bit KV cache keeps a scale per token and head

KVCacheDType = Literal["float32", "bfloat16", "int8"]
QUANTIZATION_GROUPS = (32, 64, 128)

SchedulingPolicy = Literal["fcfs", "sjf", "priority", "fair", "lpm"]

FaultKind = Literal["die", "hang", "raise", "error"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A scripted failure of the fake executor.

    `die` ends the process by SIGKILL, `hang` never comes back, `raise` fails the step as a whole, `error` ends the
    sequence named by `token_id` alone. It strikes in step number `step` of a life (1 is its first; 0 = while
    loading), or in each step that runs a sequence whose prompt contains `token_id`.
    """

    kind: FaultKind
    step: int | None = None
    token_id: int | None = None
    lives: int | None = None  # strikes only in the first so many engine processes of a client; None = in all


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """The executor that needs no model: see engine/fake_executor.py for its rule."""

    rule: Literal["mix", "script", "echo"] = "mix"
    script: tuple[int, ...] = ()  # rule "script": output p is script[p mod its length]
    vocab_size: int = 49152
    context_length: int = 8192
    kv_cache_tokens: int = 131072
    host_kv_cache_tokens: int = 0
    hidden_size: int = 64  # length of an embedding
    load_seconds: float = 0.0
    step_seconds: float = 0.0  # a step takes step_seconds + token_seconds × its tokens
    token_seconds: float = 0.0
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What was asked for. None and "auto" are filled in by `resolve`."""

    model: str  # a folder in Hugging Face layout or a .gguf file; already on disk
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantization: Quantization = "auto"  # bits of the weights; auto: those of the file, as far as the kernels can
    quantization_group: int = 128  # inputs that share a scale, with int4
    kv_cache_dtype: Literal["auto"] | KVCacheDType = "auto"  # auto: the compute type
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights of the model's shapes
    packed_cache_dir: str | None = None  # where packed weights are kept for the next start; None = nowhere
    kernels: Literal["auto", "torch", "native", "triton"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    batch_invariant: bool = False  # a request's tokens may not depend on its neighbours; on a CPU they never do
    max_model_len: int | None = None  # tokens, prompt and outputs together; None = the model's context, or what fits
    max_num_seqs: int = 128  # sequences in one step at most
    max_num_batched_tokens: int | None = None  # the token budget of a step; None = by device, and by max_step_ms
    max_step_ms: int | None = 80  # on a CPU chunks of prompts are cut to it, unless the budget in tokens is given
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None  # None = KV_SHARE_… of what is left, at least one full context
    host_kv_memory_bytes: int | None = None  # for blocks that have to leave the KV cache; None = by device
    preemption: Literal["auto", "recompute", "swap"] = "auto"  # what becomes of the KV of preempted requests
    num_threads: int | None = None  # None = all that can help, with room for the server process
    prefix_caching: bool = True
    fast_forward: bool = True  # tokens that a grammar forces are taken without computing each
    batching: Literal["continuous", "static"] = "continuous"
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_queue_wait_steps: int = 2000  # under all policies but fcfs: who has waited that long goes first
    executor: Literal["local", "fake"] = "local"
    fake: FakeOptions = field(default_factory=FakeOptions)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the configuration needs to know about a model."""

    context_length: int  # tokens it was trained for
    weight_bytes: int  # memory that its weights are still going to take (0 once they are loaded)
    kv_values_per_token: int  # numbers that one token leaves in the KV cache, all layers together
    kv_vectors_per_token: int = 0  # how many heads' keys and values these are: each has a scale in an 8-bit cache


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """What it comes to on this machine with this model. `kernels` may still be "auto": kernels.select decides."""

    model: str
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    kv_cache_dtype: KVCacheDType
    kernels: Literal["auto", "torch", "native", "triton"]
    batch_invariant: bool
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_step_ms: int | None  # None: the budget in tokens alone bounds a step
    block_size: int
    kv_cache_bytes: int  # usable by sequences: whole blocks; a null block comes on top
    num_kv_blocks: int  # kv_cache_bytes in blocks, if all layers keep everything
    host_kv_bytes: int  # for blocks that have to leave; 0 = none
    num_threads: int
    prefix_caching: bool
    batching: Literal["continuous", "static"]
    scheduling_policy: SchedulingPolicy


def resolve(config: EngineConfig, model: ModelFacts, hardware: Hardware) -> ResolvedConfig:
    """Fill in what was left open. Raises ConfigError, naming the flag to turn."""
    _check(config, model)
    device = _resolve_device(config, hardware)
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    kv_cache_dtype: KVCacheDType = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    token_bytes = model.kv_values_per_token * BYTES_PER_VALUE[kv_cache_dtype]
    if kv_cache_dtype == "int8":
        token_bytes += model.kv_vectors_per_token * KV_SCALE_BYTES
    block_bytes = config.block_size * token_bytes
    num_blocks, max_model_len = _resolve_kv(config, model, hardware, device, block_bytes)
    budget = config.max_num_batched_tokens
    return ResolvedConfig(
        model=config.model,
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kernels=config.kernels,
        batch_invariant=config.batch_invariant,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=(512 if device == "cpu" else 4096) if budget is None else budget,
        max_step_ms=config.max_step_ms if device == "cpu" and budget is None else None,
        block_size=config.block_size,
        kv_cache_bytes=num_blocks * block_bytes,
        num_kv_blocks=num_blocks,
        host_kv_bytes=_resolve_host_kv(config, hardware, device),
        num_threads=_resolve_threads(config, hardware),
        prefix_caching=config.prefix_caching,
        batching=config.batching,
        scheduling_policy=config.scheduling_policy,
    )


def _check(config: EngineConfig, model: ModelFacts) -> None:
    positive = {
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--max-step-ms": config.max_step_ms,
        "--block-size": config.block_size,
        "--kv-cache-memory": config.kv_cache_memory_bytes,
        "--threads": config.num_threads,
        "--max-queue-wait-steps": config.max_queue_wait_steps,
    }
    for flag, value in positive.items():
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1, not {value}")
    if config.max_model_len is not None and config.max_model_len > model.context_length:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: the model's context is {model.context_length} tokens"
        )
    if config.quantization_group not in QUANTIZATION_GROUPS:
        known = ", ".join(map(str, QUANTIZATION_GROUPS))
        raise ConfigError(f"--quantization-group must be one of {known}, not {config.quantization_group}")


def _resolve_device(config: EngineConfig, hardware: Hardware) -> Literal["cpu", "cuda"]:
    if config.device == "cuda" and not hardware.has_cuda:
        raise ConfigError("--device cuda: there is no NVIDIA GPU here, or the installed torch cannot use it")
    if config.device != "auto":
        return config.device
    return "cuda" if hardware.has_cuda else "cpu"


def _resolve_threads(config: EngineConfig, hardware: Hardware) -> int:
    """One thread a physical core. The server process finds room on the sibling hyperthreads; where there are none
    one core is left to it, unless that would be half of the machine."""
    if config.num_threads is not None:
        return config.num_threads
    if hardware.num_cpus <= 2:
        return hardware.num_cpus
    has_siblings = hardware.num_cores < hardware.num_cpus
    return max(2, hardware.num_cores if has_siblings else hardware.num_cores - 1)


def _resolve_kv(
    config: EngineConfig, model: ModelFacts, hardware: Hardware, device: Literal["cpu", "cuda"], block_bytes: int
) -> tuple[int, int]:
    """Usable blocks, and the context that they carry. A context that was asked for is met or refused; one that was
    left open shrinks to what fits."""
    context = config.max_model_len or model.context_length
    needed = -(-context // config.block_size) * block_bytes
    left = _memory_left(model, hardware, device)
    if config.kv_cache_memory_bytes is not None:
        memory = config.kv_cache_memory_bytes
        if device == "cpu" and memory > left:
            raise ConfigError(f"--kv-cache-memory {_show(memory)}: only {_show(left)} of memory are left")
    else:
        share = KV_SHARE_HOST if device == "cpu" else KV_SHARE_DEVICE
        memory = min(int(left * share), config.max_num_seqs * needed)
        memory = max(memory, min(needed, int(left * KV_SHARE_MOST)))
    num_blocks = memory // block_bytes
    fitting = num_blocks * config.block_size
    if fitting >= context:
        return num_blocks, context
    if config.max_model_len is not None or fitting == 0:
        raise ConfigError(
            f"one context of {context} tokens needs {_show(needed)} of KV memory and {_show(memory)} can be had: "
            "lower --max-model-len or raise --kv-cache-memory"
        )
    return num_blocks, fitting


def _resolve_host_kv(config: EngineConfig, hardware: Hardware, device: Literal["cpu", "cuda"]) -> int:
    """Where the KV cache itself lies in the host's memory a second pool there is of no use unless asked for."""
    left = hardware.memory_available_bytes
    if config.host_kv_memory_bytes is None:
        return 0 if device == "cpu" else min(HOST_KV_BYTES, int(left * HOST_KV_SHARE))
    if config.host_kv_memory_bytes > left:
        raise ConfigError(f"--host-kv-memory {_show(config.host_kv_memory_bytes)}: only {_show(left)} are left")
    return config.host_kv_memory_bytes


def _memory_left(model: ModelFacts, hardware: Hardware, device: Literal["cpu", "cuda"]) -> int:
    if device == "cpu" or hardware.device_memory_available_bytes is None:
        available = hardware.memory_available_bytes
    else:
        available = hardware.device_memory_available_bytes
    return max(0, available - model.weight_bytes)


def _show(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
