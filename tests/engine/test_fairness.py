"""An engine that is faster than the server must not take the event loop for itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from engine.client import EngineClient, RequestStream

STREAMS, TOKENS = 64, 300
TOKEN_SECONDS = 20e-6  # what the server does for a token: text, JSON, a write


class LoopWatch:
    """The CPU time of each turn of the event loop: how long everyone else had to wait."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = time.thread_time()
        self.turns: list[float] = []
        self._handle = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        now = time.thread_time()
        self.turns.append(now - self._last)
        self._last = now
        self._handle = self._loop.call_soon(self._tick)

    def stop(self) -> list[float]:
        """All turns, longest first."""
        self._handle.cancel()
        return sorted(self.turns, reverse=True)


async def consume(stream: RequestStream) -> int:
    num_tokens = 0
    async for updates in stream:
        for update in updates:
            num_tokens += len(update.new_token_ids)
            done_at = time.thread_time() + TOKEN_SECONDS
            while time.thread_time() < done_at:
                pass
    return num_tokens


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_consumers_that_fall_behind_leave_room_for_others(
    harness: Any, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Seen with 64 streams over a fake engine: /health answered after more than a second, because all that had piled
    up was read, and then written, in one turn of the loop."""

    async def run() -> tuple[list[int], list[float]]:
        client = EngineClient(harness.config())
        await client.start()
        await client.wait_ready()
        watch = LoopWatch()
        streams = [client.submit(harness.request(client, TOKENS)) for _ in range(STREAMS)]
        counts = await asyncio.gather(*map(consume, streams))
        turns = watch.stop()
        await client.close()
        return counts, turns

    with asyncio.Runner(loop_factory=new_loop) as runner:
        counts, turns = runner.run(run())
    assert counts == [TOKENS] * STREAMS
    assert turns[0] < 0.02
