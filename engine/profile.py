"""What the engine did, step by step, as a trace for Perfetto or chrome://tracing.

The format is Chrome's Trace Event JSON: one track for the loop, one for the executor, times in microseconds.
"""

from __future__ import annotations

import json
import os
from typing import Any

from engine.core.plan import StepTimes, TimedSpan
from engine.types import StepStats

MAX_STEPS = 1000  # of one profile: some 200 operations each for a small model, 100 bytes an operation
_LOOP, _EXECUTOR = 1, 2  # the tracks


class Profile:
    """Gathers the events of the next `max_steps` steps; times are time.monotonic()'s."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = min(max_steps, MAX_STEPS)
        self._num_steps = 0
        self._events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": os.getpid(), "args": {"name": "octavo engine"}},
            *(
                {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": tid, "args": {"name": name}}
                for tid, name in ((_LOOP, "loop"), (_EXECUTOR, "executor"))
            ),
        ]

    @property
    def full(self) -> bool:
        """Whether no more steps are taken in."""
        return self._num_steps >= self._max_steps

    def add(self, stats: StepStats, times: StepTimes | None, num_sequences: int, ended_at: float) -> None:
        """A step that has run; `ended_at` is when it had been published."""
        if self.full:
            return
        self._num_steps += 1
        about = {
            "step": stats.step_id,
            "sequences": num_sequences,
            "prefill_tokens": stats.num_prefill_tokens,
            "decode_tokens": stats.num_decode_tokens,
        }
        submitted_at = stats.started_at + stats.schedule_seconds
        collected_at = submitted_at + stats.execute_seconds
        updated_at = collected_at + stats.update_seconds
        self._slice(_LOOP, TimedSpan("schedule", stats.started_at, submitted_at), about)
        self._slice(_LOOP, TimedSpan("update", collected_at, updated_at), about)
        self._slice(_LOOP, TimedSpan("publish", updated_at, ended_at), about)
        self._slice(_EXECUTOR, TimedSpan("execute", submitted_at, collected_at), about)
        if times is not None:
            self._slice(_EXECUTOR, TimedSpan("forward", times.forward_begin, times.forward_end), about)
            self._slice(_EXECUTOR, TimedSpan("sample", times.forward_end, times.sample_end), about)
            for span in times.operations:
                self._slice(_EXECUTOR, span, {})
        counts = {"running": stats.num_running, "waiting": stats.num_waiting}
        self._events.append(
            {"ph": "C", "name": "sequences", "pid": os.getpid(), "ts": ended_at * 1e6, "args": counts},
        )

    def _slice(self, track: int, span: TimedSpan, about: dict[str, int]) -> None:
        self._events.append(
            {
                "ph": "X",
                "name": span.name,
                "pid": os.getpid(),
                "tid": track,
                "ts": round(span.begin * 1e6, 1),
                "dur": round((span.end - span.begin) * 1e6, 1),
                "args": about,
            }
        )

    def trace(self) -> bytes:
        """The JSON of all of it."""
        return json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
