"""What it costs to move a block to the host's memory, against computing tokens: measured once, at the start."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from engine.runner.model_runner import ModelRunner
from kernels.interface import Array, KernelSet

PROBE_TOKENS = 128
_PROBE_BLOCKS = 8  # beside the null block


def measure_copy_costs(
    kernels: KernelSet,
    runner: ModelRunner,
    kv_caches: Sequence[Array],
    host_kv_caches: Sequence[Array],
    num_tokens: int,
) -> list[int]:
    """Per KV group: one block, one way, in thousandths of one token of a prompt of num_tokens. Nothing may run yet:
    the null blocks are written."""

    def copy(group: int) -> Callable[[], None]:
        null = np.zeros(1, np.int32)

        def both_ways() -> None:
            for _ in range(_PROBE_BLOCKS):
                kernels.move_blocks(kv_caches[group], null, host_kv_caches[group], null)
                kernels.move_blocks(host_kv_caches[group], null, kv_caches[group], null)

        return both_ways

    token_seconds = _seconds(kernels, lambda: runner.warm_up(num_tokens)) / num_tokens
    block_seconds = [_seconds(kernels, copy(group)) / (2 * _PROBE_BLOCKS) for group in range(len(kv_caches))]
    return [math.ceil(1000 * seconds / token_seconds) for seconds in block_seconds]


def _seconds(kernels: KernelSet, work: Callable[[], None]) -> float:
    """Of the second time: the first one sets things up."""
    work()
    kernels.synchronize()
    start = time.perf_counter()
    work()
    kernels.synchronize()
    return time.perf_counter() - start
