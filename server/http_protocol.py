"""uvicorn's HTTP protocol with what it leaves open: a bounded head, errors in the API's shape, a way to cut a
connection whose client does not read, and requests that are told when their client goes or talks nonsense."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.errors import WireError, to_wire_status

ABORT_EXTENSION = "octavo.abort"  # in scope["extensions"]: a function that closes the connection without flushing


_LINGER_SECONDS = 2.0  # for the client to read why it was refused


class BoundedHttpProtocol(HttpToolsProtocol):
    """The head of each request must be small and arrive in time. Subclasses set the limits."""

    max_head_bytes = 64 << 10
    head_timeout_seconds = 20.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answering: RequestResponseCycle | None = None  # the request whose turn it is
        self._in_head = True
        self._head_bytes = 0
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(
            self.head_timeout_seconds, self._head_too_slow
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._leave_request()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _leave_request(self) -> bool:
        """Tell the request whose turn it is that its client has gone: uvicorn tells the one that arrived last, which
        may be waiting behind it. Returns whether its answer has begun."""
        cycle = self._answering
        if cycle is None or cycle.response_complete:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return cycle.response_started

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not (self._refused or self.transport.is_closing()):
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse(431, f"The headers exceed this server's limit of {self.max_head_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}  # type: ignore[dict-item]
        self._in_head = True
        self._head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_seconds, self._head_too_slow)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._cancel_head_timer()
        super().on_headers_complete()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_slow(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            self._refuse(408, "The headers did not arrive in time")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close; the request never reaches the application. Where another answer is under way, only
        close: the client would take ours for a part of it."""
        if self._leave_request():
            self.transport.abort()
            return
        error: WireError = to_wire_status(status, message)
        body = error.json()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self._refused = True
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()  # closing now, with data unread, would reset the connection before it is read
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def bounded_protocol(max_head_bytes: int, head_timeout_seconds: float) -> type[Any]:
    """The protocol with these limits, as uvicorn takes it."""
    limits = {"max_head_bytes": max_head_bytes, "head_timeout_seconds": head_timeout_seconds}
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), limits)
