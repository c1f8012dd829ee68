"""How soon to start the next engine after a death: back-off and a circuit breaker. Pure: the caller brings the time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """After `max_deaths` deaths within `window_seconds` and no progress between, the circuit opens."""

    first_delay_seconds: float = 0.5  # before the second start without progress, then doubling; the first is at once
    max_delay_seconds: float = 30.0
    max_deaths: int = 6
    window_seconds: float = 600.0
    open_seconds: float = 30.0  # doubles with each opening without progress
    max_open_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Wait this long, then start; with the circuit open nothing is accepted meanwhile."""

    delay_seconds: float
    open: bool


class Recovery:
    """The history of deaths since the last progress."""

    def __init__(self, options: RecoveryOptions) -> None:
        self._options = options
        self._deaths: deque[float] = deque()
        self._num_openings = 0

    def progress(self) -> None:
        """Some request got further: whatever is wrong does not kill every engine."""
        self._deaths.clear()
        self._num_openings = 0

    def death(self, now: float) -> Decision:
        """An engine has died; `now` never decreases."""
        options = self._options
        self._deaths.append(now)
        while self._deaths[0] < now - options.window_seconds:
            self._deaths.popleft()
        if len(self._deaths) >= options.max_deaths:
            self._num_openings += 1
            delay = _doubled(options.open_seconds, self._num_openings - 1, options.max_open_seconds)
            return Decision(delay, open=True)
        if len(self._deaths) == 1:
            return Decision(0.0, open=False)
        delay = _doubled(options.first_delay_seconds, len(self._deaths) - 2, options.max_delay_seconds)
        return Decision(delay, open=False)


def _doubled(seconds: float, times: int, most: float) -> float:
    return min(seconds * 2.0 ** min(times, 64), most)
