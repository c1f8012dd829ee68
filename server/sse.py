"""Server-sent events, byte for byte: LF line ends, comments to keep silent streams alive, an error event, [DONE].

Our own framing, not a library's: the official client chokes on `id:`, `retry:` and named pings, and a chunk has to cost
microseconds. `EventStream` is the response: it writes frames as they come, and ends its source when the client leaves
or stops reading, so that the work behind it is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import to_wire
from server.http_protocol import ABORT_EXTENSION

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


def frame(data: bytes) -> bytes:
    """An event with one line of data (JSON: no raw line ends inside)."""
    return b"data: " + data + b"\n\n"


def named_frame(event: str, data: bytes) -> bytes:
    """An event with a name, for the APIs that have them."""
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


def error_frame(error: Exception) -> bytes:
    """The event that tells of an error after the response has begun."""
    return frame(to_wire(error).json())


class EventStream(Response):
    """Sends what `frames` yields; each item is one or more whole events.

    The status line waits for the first item, so that a request refused by the engine still gets its own status, but
    no longer than `comment_seconds`; later silences are filled with comments at that interval. An exception in
    `frames` becomes its `on_error` event. `frames` is closed in every case: at its end, when the client
    disconnects, and when the client has read nothing for `slow_reader_seconds`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes],
        *,
        comment_seconds: float,
        slow_reader_seconds: float,
        on_error: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._comment_seconds = comment_seconds
        self._slow_reader_seconds = slow_reader_seconds
        self._on_error = on_error
        self._started = False
        self._sending_since: float | None = None  # when the send now in progress began
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        async with contextlib.aclosing(self._frames):
            writer = asyncio.ensure_future(self._write(send))
            watcher = asyncio.ensure_future(self._watch(receive, send))
            try:
                await asyncio.wait((writer, watcher), return_when=asyncio.FIRST_COMPLETED)
                if self._sending_since is not None and not writer.done():
                    _cut(scope)  # closing would wait for what the client does not read
            finally:
                writer.cancel()
                watcher.cancel()
                outcomes = await asyncio.gather(writer, watcher, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _write(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for data in self._frames:
                if not self._started:
                    await self._start(send)
                self._sending_since = loop.time()
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._last_sent = loop.time()
                self._sending_since = None
        except Exception as error:
            if not self._started:
                raise  # nothing was sent: the error gets a status of its own
            await self._send_body(send, self._on_error(error))
        if not self._started:
            await self._start(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _send_body(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Returns when the client is gone, or as good as gone."""
        loop = asyncio.get_running_loop()
        tick = min(self._comment_seconds, self._slow_reader_seconds)
        while True:
            try:
                async with asyncio.timeout(tick):
                    while (await receive())["type"] != "http.disconnect":
                        pass
                return
            except TimeoutError:
                pass
            if self._sending_since is not None:
                if loop.time() - self._sending_since >= self._slow_reader_seconds:
                    return
            elif loop.time() - self._last_sent >= self._comment_seconds * 0.99:
                # Safe beside the writer: it is waiting for a frame, and a frame is sent in one piece.
                if not self._started:
                    await self._start(send)
                await self._send_body(send, COMMENT)
                self._last_sent = loop.time()


def _cut(scope: Scope) -> None:
    """Close the connection at once, where the HTTP layer can."""
    abort = scope.get("extensions", {}).get(ABORT_EXTENSION)
    if abort is not None:
        abort()
