"""An event loop whose clock jumps: real sockets, no waiting, exact times.

While nothing can be read or written, the clock moves straight to the next timer. Loopback data is readable as
soon as it is written, so code between two timers takes no (virtual) time at all.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

_GRACE_SECONDS = 0.0005  # real time that the kernel is given to hand data over


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout=None):
        events = super().select(0) or super().select(min(_GRACE_SECONDS, timeout or 0.0))
        if not events:
            if timeout is None:
                return super().select(1.0)
            self.now += max(timeout, 0.0)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual and starts at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
