"""The profile that is being taken, seen from the server's side: one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.errors import ProfileRefused


class ProfileRequest:
    """Lives on the event loop."""

    def __init__(self) -> None:
        self._trace: asyncio.Future[bytes] | None = None  # b"" if the engine died meanwhile

    def begin(self) -> None:
        """Raises ProfileRefused while one is being taken."""
        if self._trace is not None and not self._trace.done():
            raise ProfileRefused("a profile is being taken")
        self._trace = asyncio.get_running_loop().create_future()

    async def end(self, ask: Callable[[], None]) -> bytes:
        """The trace, after the engine has been asked for it. Raises ProfileRefused if none is taken or it was lost."""
        if self._trace is None:
            raise ProfileRefused("no profile is being taken")
        ask()
        trace = await self._trace
        self._trace = None
        if not trace:
            raise ProfileRefused("the engine died while the profile was taken")
        return trace

    def told(self, trace: bytes) -> None:
        """The engine has sent it, or has gone."""
        if self._trace is not None and not self._trace.done():
            self._trace.set_result(trace)
