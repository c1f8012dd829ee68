"""Whether an engine is alive, told from its frames and a clock: pure, so that a test can be the clock.

Alive means making progress: a step that has begun must end within its limit, and an engine that says nothing must
answer a ping. A flag "I am alive" set by another thread would prove nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

_OWN_STALL_SECONDS = 1.0  # a check this late means that we, too, were stopped: give the engine its time again


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an engine may take before it counts as stuck."""

    start_seconds: float = 600.0  # between two signs of progress while loading
    first_step_seconds: float = 600.0  # kernels may be compiled, weights paged in
    step_seconds: float = 120.0
    ping_interval_seconds: float = 5.0  # silence of an idle engine before it is pinged
    pong_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do now, and when to look again."""

    next_check_at: float
    ping: bool = False
    stuck: str | None = None  # why the engine counts as stuck


class Watchdog:
    """One engine process, from its spawn on. Times are those of one monotonic clock."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._ready = False
        self._steps_running = 0
        self._any_step_done = False
        self._heard_at = now
        self._pinged_at: float | None = None
        self._check_due_at = now

    def heard(self, now: float) -> None:
        """Any frame arrived."""
        self._heard_at = now
        self._pinged_at = None

    def ready(self) -> None:
        """Loading is over."""
        self._ready = True

    def step_begun(self) -> None:
        self._steps_running += 1

    def step_done(self) -> None:
        self._steps_running -= 1
        self._any_step_done = True

    def check(self, now: float) -> Verdict:
        """To be called when the last verdict said so; the first time at once."""
        if now - self._check_due_at > _OWN_STALL_SECONDS:
            self.heard(now)
        verdict = self._judge(now)
        self._check_due_at = verdict.next_check_at
        return verdict

    def _judge(self, now: float) -> Verdict:
        limits = self._limits
        if not self._ready:
            return self._due(now, self._heard_at + limits.start_seconds, "loading stands still")
        if self._steps_running:
            limit = limits.step_seconds if self._any_step_done else limits.first_step_seconds
            return self._due(now, self._heard_at + limit, f"a step has not ended within {limit:g} s")
        if self._pinged_at is not None:
            return self._due(now, self._pinged_at + limits.pong_seconds, "no answer to a ping")
        if now - self._heard_at < limits.ping_interval_seconds:
            return Verdict(self._heard_at + limits.ping_interval_seconds)
        self._pinged_at = now
        return Verdict(now + limits.pong_seconds, ping=True)

    def _due(self, now: float, deadline: float, reason: str) -> Verdict:
        if now >= deadline:
            return Verdict(now, stuck=reason)
        # a state with a shorter limit may begin before the deadline
        return Verdict(min(deadline, now + self._limits.ping_interval_seconds))
