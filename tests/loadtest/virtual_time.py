"""An event loop whose clock jumps: real sockets, no waiting, exact times.

While nothing can be read or written, the clock moves straight to the next timer. Loopback data is readable as soon
as it is written, so the code between two timers takes no (virtual) time at all.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")

_GRACE_SECONDS = 0.00005  # real time that the kernel is given to hand data over


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(5.0)
        events = super().select(0)
        if not events and timeout > 0:
            time.sleep(_GRACE_SECONDS)
            events = super().select(0)
        if not events:
            self.now += max(timeout, 0.0)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual and starts at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Like asyncio.run, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
