"""One keep-alive HTTP/1.1 connection on a raw socket, as light as asyncio allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

Clock = Callable[[], float]


class Receiver(Protocol):
    """Takes one response as it arrives."""

    left: bool  # set by the receiver when it wants no more: the connection is closed at once

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Status line and headers (names in lower case) are complete."""

    def on_body(self, data: bytes, now: float) -> None:
        """A piece of the decoded body; `now` is when its last byte was read from the socket."""


class ConnectionLost(Exception):
    """The peer closed, reset or broke the protocol before the response was complete."""

    def __init__(self, reason: str, *, untouched: bool) -> None:
        super().__init__(reason)
        self.untouched = untouched  # not one byte of the response had arrived


class Connection(asyncio.Protocol):
    """Carries one exchange at a time. Also the callback object of the HTTP parser (`on_…` methods)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now = 0.0
        self._headers: dict[str, str] = {}
        self._pause_seconds = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._receiver: Receiver | None = None
        self._complete: asyncio.Future[None] | None = None
        self._touched = False
        self._ends_with_connection = False  # the body has neither a length nor chunks
        self.reusable = True

    async def exchange(self, request: bytes, receiver: Receiver, pause_seconds: float = 0.0) -> None:
        """Sends `request` and returns when the response is complete or the receiver has left.

        With `pause_seconds` the client reads nothing for so long after each piece: a slow reader. Raises
        ConnectionLost. If cancelled, the connection is closed: half a response makes it useless.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLost("closed while idle", untouched=True)
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._receiver, self._pause_seconds = {}, receiver, pause_seconds
        self._touched = self._ends_with_connection = False
        self._complete = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._complete
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._complete = self._receiver = None

    def close(self) -> None:
        """Closes at once, without waiting for unsent data."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        if self._parser is None or self._complete is None:
            self.close()  # bytes that no request asked for
            return
        self._touched = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"bad HTTP: {error}")
            return
        if self._pause_seconds and self._transport is not None and not self._complete.done():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(self._pause_seconds, self._resume)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._ends_with_connection:
            self._finish()
        else:
            self._fail(str(exc) if exc else "connection closed by the server")

    # callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._receiver is not None
        self._ends_with_connection = {"content-length", "transfer-encoding"}.isdisjoint(self._headers)
        self._receiver.on_head(self._parser.get_status_code(), self._headers)

    def on_body(self, body: bytes) -> None:
        if self._receiver is None or self._receiver.left:
            return
        self._receiver.on_body(body, self._now)
        if self._receiver.left:
            self.close()
            self._finish()

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self.reusable = self.reusable and self._parser.should_keep_alive()
        self._finish()

    # inside

    def _finish(self) -> None:
        if self._complete is not None and not self._complete.done():
            self._complete.set_result(None)

    def _fail(self, reason: str) -> None:
        self.close()
        if self._complete is not None and not self._complete.done():
            self._complete.set_exception(ConnectionLost(reason, untouched=not self._touched))

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
