"""What the engine says about itself, turned into samples when somebody scrapes: pure, no Prometheus here."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from engine.types import KVGroupStats, StepStats

MAX_EXPERT_LABELS = 256
KV_STATES = ("free", "private", "shared", "cached")
_TOTALS = {
    "engine_steps": "step_id",
    "prefix_query_tokens": "prefix_query_tokens_total",
    "prefix_hit_tokens": "prefix_hit_tokens_total",
    "evicted_blocks": "evicted_blocks_total",
    "preemptions": "preemptions_total",
    "parked": "parked_total",
    "preempted_tokens": "preempted_tokens_total",
    "overrun_tokens": "overrun_tokens_total",
    "swapped_out_blocks": "swapped_out_blocks_total",
    "swapped_in_blocks": "swapped_in_blocks_total",
}
_SPLIT = {  # totals that share a metric: metric, label
    "swapped_out_blocks": ("swapped_blocks", "out"),
    "swapped_in_blocks": ("swapped_blocks", "in"),
    "parked": ("preemptions", "swap"),
}
_GAUGES = {
    "requests_running": "num_running",
    "requests_waiting": "num_waiting",
    "requests_swapped": "num_swapped",
    "step_prefill_tokens": "num_prefill_tokens",
    "step_decode_tokens": "num_decode_tokens",
    "kv_wasted_slots": "num_wasted_slots",
    "oldest_waiting_steps": "oldest_waiting_steps",
}


class Sample(NamedTuple):
    """A value of one series of a metric in the catalogue."""

    name: str
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class EngineLife:
    """What the server's side knows of the engine processes, now."""

    restarts: int = 0
    replayed_choices: int = 0
    failed_choices: int = 0
    dropped_tokens: int = 0
    longest_wait_seconds: float = 0.0
    pid: int | None = None  # of the one that runs


class Totals:
    """The engine's counts over the lives of all its processes: each process counts from zero."""

    def __init__(self) -> None:
        self._base = dict.fromkeys(_TOTALS, 0)  # of the processes that have gone
        self._current = dict.fromkeys(_TOTALS, 0)
        self._experts_before: tuple[int, ...] = ()  # of the processes that have gone
        self._experts: tuple[int, ...] = ()
        self._restarts = 0

    def note(self, stats: StepStats, restarts: int) -> None:
        """Take in the state of the engine process that came after so many restarts."""
        if restarts != self._restarts:
            self._restarts = restarts
            for name, count in self._current.items():
                self._base[name] += count
                self._current[name] = 0
            self._experts_before, self._experts = self.expert_tokens, ()
        for name, field in _TOTALS.items():
            self._current[name] = max(self._current[name], getattr(stats, field))
        self._experts = max(self._experts, stats.expert_tokens_total, key=sum)

    def __getitem__(self, name: str) -> int:
        return self._base[name] + self._current[name]

    @property
    def expert_tokens(self) -> tuple[int, ...]:
        """By expert; () for a model without."""
        return tuple(map(sum, zip_longest(self._experts_before, self._experts, fillvalue=0)))


def samples(stats: StepStats | None, totals: Totals, life: EngineLife) -> Iterator[Sample]:
    """All that is read at a scrape; without an engine the gauges are 0 and the counts stand."""
    for name, field in _GAUGES.items():
        yield Sample(name, (), getattr(stats, field, 0))
    for name in _TOTALS:
        if name == "preemptions":
            yield Sample(name, ("recompute",), totals[name] - totals["parked"])
        elif name == "overrun_tokens":
            yield Sample(name, (), totals[name] + life.dropped_tokens)
        elif name in _SPLIT:
            metric, label = _SPLIT[name]
            yield Sample(metric, (label,), totals[name])
        else:
            yield Sample(name, (), totals[name])
    for expert, count in _by_expert(totals.expert_tokens):
        yield Sample("expert_tokens", (expert,), count)
    if stats is not None:
        yield from _blocks("kv_blocks", stats.kv_groups)
        yield from _blocks("host_kv_blocks", stats.kv_host_groups)
    yield Sample("kv_usage_ratio", (), usage_ratio(stats))
    yield Sample("oldest_waiting_seconds", (), life.longest_wait_seconds)
    yield Sample("engine_restarts", (), life.restarts)
    yield Sample("replayed_choices", (), life.replayed_choices)
    yield Sample("failed_choices", (), life.failed_choices)


def _blocks(name: str, groups: tuple[KVGroupStats, ...]) -> Iterator[Sample]:
    for number, group in enumerate(groups):
        for state in KV_STATES:
            yield Sample(name, (str(number), state), getattr(group, state))


def _by_expert(counts: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """(label, tokens): so many labels at most, however large the mixture."""
    yield from ((str(expert), count) for expert, count in enumerate(counts[:MAX_EXPERT_LABELS]))
    if len(counts) > MAX_EXPERT_LABELS:
        yield "other", sum(counts[MAX_EXPERT_LABELS:])


def usage_ratio(stats: StepStats | None) -> float:
    """Share of the KV blocks that live requests hold, of the fullest group; 0 … 1."""
    return max(map(_usage, stats.kv_groups), default=0.0) if stats is not None else 0.0


def resident_bytes(pid: int | str) -> int | None:
    """Memory of a process; None where the system does not tell."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * resource.getpagesize()


def _usage(group: KVGroupStats) -> float:
    held = group.private + group.shared
    return held / max(1, held + group.free + group.cached)
