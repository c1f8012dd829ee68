"""What steps cost on this machine, measured at the start: how long they take alone, with tokens, and far in."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.core.step_cost import StepCost
from engine.runner.model_runner import ModelRunner
from kernels.interface import KernelSet

_REPEATS = 3
_PROBE_TOKENS = 128
_LEAST_PROBE_TOKENS = 16
_PROBE_SECONDS = 0.1  # about what one probe may take
_PROBE_CONTEXT = 1024  # tokens


def measure_step_cost(
    kernels: KernelSet, runner: ModelRunner, max_step_seconds: float, max_tokens: int, max_model_len: int
) -> StepCost:
    """In nanoseconds, for steps of at most max_tokens. Nothing may run yet: the null blocks are written."""
    alone = _seconds(kernels, lambda: runner.warm_up(1))
    affordable = int(_PROBE_SECONDS / max(1e-9, alone))
    num_tokens = min(max(_LEAST_PROBE_TOKENS, min(_PROBE_TOKENS, affordable)), max_tokens, max_model_len)
    together = _seconds(kernels, lambda: runner.warm_up(num_tokens))
    context = max(0, min(_PROBE_CONTEXT, max_model_len - num_tokens))
    far_in = _seconds(kernels, lambda: runner.warm_up(num_tokens, context))
    return step_cost(max_step_seconds, alone, together, far_in, num_tokens, context)


def step_cost(
    max_step_seconds: float, alone: float, together: float, far_in: float, num_tokens: int, context: int
) -> StepCost:
    """From the seconds of one token, of num_tokens, and of num_tokens that see `context` keys more."""
    per_token = max(0.0, together - alone) / max(1, num_tokens - 1)
    per_key = max(0.0, far_in - together) / max(1, num_tokens * context)
    nanoseconds = [
        round(seconds * 1e9) for seconds in (max_step_seconds, max(0.0, alone - per_token), per_token, per_key)
    ]
    return StepCost(*nanoseconds)


def _seconds(kernels: KernelSet, work: Callable[[], None]) -> float:
    """The best of a few times after one that sets things up."""
    work()
    kernels.synchronize()
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        kernels.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
