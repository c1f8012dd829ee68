"""Continuous and static batching, simulated step by step with a measured step cost.

What a measured ratio should be: the same requests, the same limits, no server. With a cost that does not grow
with the batch, the ratio of requests/s is the ceiling that scheduling alone can give (for output lengths uniform on
1 … L and batches of B about 2B/(B+1)); with the cost of a real machine it is what can be expected there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from msgspec import Struct

_INSTANT = 1e-6  # seconds


class Batching(StrEnum):
    """When waiting requests join the batch."""

    CONTINUOUS = "continuous"  # as soon as there is a seat and budget left
    STATIC = "static"  # only when the batch is empty


class StepCost(Struct, frozen=True, tag_field="schema", tag="octavo.bench.cost/1"):
    """Seconds of one engine step, measured at a few sizes and linear between them (and beyond the last two).

    A mixed step costs its decodes plus its prefill, the fixed part (prefill extrapolated to 0 tokens) once.
    """

    decode: tuple[tuple[int, float], ...]  # (sequences, seconds), ascending
    prefill: tuple[tuple[int, float], ...]  # (tokens, seconds), ascending

    def seconds(self, num_decodes: int, num_prefill_tokens: int) -> float:
        """The cost of a step of so many decodes and prefill tokens, at least one of the two."""
        if not num_prefill_tokens:
            return _interpolate(self.decode, num_decodes)
        if not num_decodes:
            return _interpolate(self.prefill, num_prefill_tokens)
        fixed = max(0.0, _interpolate(self.prefill, 0))
        prefill = _interpolate(self.prefill, num_prefill_tokens)
        return _interpolate(self.decode, num_decodes) + max(0.0, prefill - fixed)


def constant_cost(seconds: float) -> StepCost:
    """A step that costs the same whatever is in it."""
    points = ((1, seconds), (2, seconds))
    return StepCost(decode=points, prefill=points)


@dataclass(frozen=True, slots=True)
class Job:
    """One request. In a closed loop the arrival is ignored."""

    arrival: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Engine:
    """The limits of the simulated engine."""

    batching: Batching
    max_num_seqs: int
    token_budget: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the simulation gave; times in seconds."""

    requests_per_second: float
    mean_latency: float
    p99_latency: float
    mean_ttft: float
    waste: float  # share of seat time (max_num_seqs × duration) in which no request was decoding
    max_in_flight: int  # arrived and not ended


@dataclass(slots=True)
class _Running:
    job: Job
    arrived_at: float
    computed: int = 0  # tokens of the prompt
    produced: int = 0
    first_at: float = 0.0


def simulate(jobs: Sequence[Job], cost: StepCost, engine: Engine, users: int | None = None) -> Outcome:
    """Runs all jobs: open loop by their arrivals, or closed loop by `users` who send the next when one ends.

    Each step hands out the token budget as the engine does: one token to each running decode, then the rest of
    partly computed prompts, then new ones, first come first served. Users begin one after the other,
    and a user's next request comes an instant after its last one's end, too late for the step that begins then: as
    over HTTP, where a static batch that begins with the first arrival holds it alone.
    """
    if users is None:
        arriving = deque(sorted(((job.arrival, job) for job in jobs), key=lambda pair: pair[0]))
        pending: deque[Job] = deque()
    else:
        arriving = deque((number * _INSTANT, job) for number, job in enumerate(jobs[:users]))
        pending = deque(jobs[users:])
    waiting: deque[_Running] = deque()
    running: list[_Running] = []
    ended: list[tuple[float, float, float]] = []  # (arrived, first token, end)
    now, max_in_flight = 0.0, 0
    while arriving or waiting or running:
        if not waiting and not running:
            now = max(now, arriving[0][0])
        while arriving and arriving[0][0] <= now:
            at, job = arriving.popleft()
            waiting.append(_Running(job, at))
        num_decodes, chunks = _schedule(waiting, running, engine)
        max_in_flight = max(max_in_flight, len(waiting) + len(running))
        now += cost.seconds(num_decodes, sum(chunks.values()))
        for seat in _advance(running, chunks, now):
            running.remove(seat)
            ended.append((seat.arrived_at, seat.first_at, now))
            if pending:
                arriving.append((now + _INSTANT, pending.popleft()))
    times = np.array(ended)
    latency = times[:, 2] - times[:, 0]
    duration = now - float(times[:, 0].min())
    decoding = float((times[:, 2] - times[:, 1]).sum())
    return Outcome(
        requests_per_second=len(ended) / duration,
        mean_latency=float(latency.mean()),
        p99_latency=float(np.percentile(latency, 99)),
        mean_ttft=float((times[:, 1] - times[:, 0]).mean()),
        waste=1.0 - decoding / (engine.max_num_seqs * duration),
        max_in_flight=max_in_flight,
    )


def _schedule(waiting: deque[_Running], running: list[_Running], engine: Engine) -> tuple[int, dict[int, int]]:
    """Moves admitted requests from waiting to running. Returns the decodes, and index in running → prompt tokens."""
    decodes = sum(seat.computed == seat.job.prompt_tokens for seat in running)
    budget = max(0, engine.token_budget - decodes)
    # a static batch is filled once, when it is empty, and then only drains
    may_join = engine.batching is Batching.CONTINUOUS or not running
    chunks: dict[int, int] = {}
    index = 0
    while budget and (index < len(running) or (may_join and waiting and len(running) < engine.max_num_seqs)):
        if index == len(running):
            running.append(waiting.popleft())
        missing = running[index].job.prompt_tokens - running[index].computed
        if missing:
            chunks[index] = min(missing, budget)
            budget -= chunks[index]
        index += 1
    if may_join and engine.batching is Batching.STATIC:
        while waiting and len(running) < engine.max_num_seqs:
            running.append(waiting.popleft())  # seated now, computed when the budget reaches them
    return decodes, chunks


def _advance(running: list[_Running], chunks: dict[int, int], now: float) -> list[_Running]:
    """Gives every scheduled seat its tokens; returns the seats that have ended."""
    for index, seat in enumerate(running):
        if index in chunks:
            seat.computed += chunks[index]
            if seat.computed == seat.job.prompt_tokens:
                seat.produced, seat.first_at = 1, now
        elif seat.computed == seat.job.prompt_tokens:
            seat.produced += 1
    return [seat for seat in running if seat.produced >= seat.job.output_tokens]


def _interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """Piecewise linear through the points, extended beyond both ends by the nearest two."""
    if len(points) == 1:
        return points[0][1]
    index = 1
    while index < len(points) - 1 and points[index][0] < x:
        index += 1
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
