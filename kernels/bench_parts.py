"""What benchmarks of kernels are made of, on a CPU and on a card."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from kernels.interface import Array, HostWeight, KernelSet, KVCacheSpec, SamplingBatch

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[], object]
    num_bytes: float  # that must be moved at least
    num_flops: float = 0.0


def random_weight(format: str, rows: int, columns: int) -> HostWeight:
    values = np.random.default_rng(0).standard_normal((rows, columns), np.float32) * np.float32(0.02)
    if format == "F32":
        return HostWeight(format, values, rows, columns)
    if format == "BF16":
        return HostWeight(format, values.astype(ml_dtypes.bfloat16), rows, columns)
    return HostWeight(format, quantize(values, GGMLQuantizationType[format]), rows, columns)


def activations(kernels: KernelSet, *shape: int) -> Array:
    host = np.random.default_rng(1).standard_normal(shape, np.float32)
    return kernels.upload(host, kernels.activation_dtype)


def filled_cache(kernels: KernelSet, spec: KVCacheSpec) -> Array:
    """Random keys and values: the pages of a zeroed cache may all be one."""
    cache = kernels.new_kv_cache(spec)
    num_slots = spec.num_blocks * spec.block_size
    x = activations(kernels, num_slots, spec.num_kv_heads, spec.head_dim)
    positions = kernels.upload(np.zeros(num_slots, np.int32))
    slots = kernels.upload(np.arange(num_slots, dtype=np.int64))
    for layer in range(spec.num_layers):
        kernels.rope_and_store_kv(x, x, x, positions, None, None, cache, layer, slots)
    return cache


def sampling_of(kernels: KernelSet, rows: int, vocab_size: int) -> Iterator[Case]:
    """Draws in the usual ways and logprobs, with what is copied to and from the host."""
    logits = kernels.upload(np.random.default_rng(2).standard_normal((rows, vocab_size), np.float32) * 3)
    nothing, num_bytes = np.zeros(rows, np.int32), 4.0 * rows * vocab_size
    for name, temperature, top_k, top_p in (
        ("greedy", 0.0, 0, 1.0),
        ("temperature 1", 1.0, 0, 1.0),
        ("top_k 40", 1.0, 40, 1.0),
        ("top_p 0.9", 1.0, 0, 0.9),
    ):
        batch = SamplingBatch(
            temperature=np.full(rows, temperature, np.float32),
            top_k=np.full(rows, top_k, np.int32),
            top_p=np.full(rows, top_p, np.float32),
            min_p=np.zeros(rows, np.float32),
            seed=np.arange(rows, dtype=np.uint64),
            choice_index=nothing,
            output_position=nothing,
        )
        yield Case(f"sample, {name}, {rows} rows", partial(kernels.sample, logits, batch), num_bytes)
    yield Case(f"logprobs, {rows} rows", partial(kernels.logprobs, logits, nothing, 5), num_bytes)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
