"""The engine's end of the socket: commands in, events out, never blocked by a server that does not read."""

from __future__ import annotations

import select
import socket
from typing import Protocol

from engine.errors import EngineError
from engine.wire import Command, Event, FrameSplitter, decode_command, encode

_CHUNK_BYTES = 1 << 18
_SOCKET_BUFFER_BYTES = 1 << 20


class LinkClosed(EngineError):
    """The server has gone: nobody is left to serve."""


class Link(Protocol):
    """What the loop needs of the outside world."""

    def receive(self, timeout_seconds: float | None) -> list[Command]:
        """Commands that have arrived, in order; waits up to the time-out for the first (None = without end).
        Raises LinkClosed when the other end has gone and all that it sent has been handed out."""

    def send(self, event: Event) -> None:
        """Queue an event; returns at once."""


class SocketLink:
    """A Link over a connected stream socket. One thread.

    What the socket does not take is kept and sent later (on the next call of either method), so that a server that
    pauses costs memory, not steps.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self._socket = sock
        self._splitter = FrameSplitter()
        self._unsent = bytearray()
        self._closed = False

    def receive(self, timeout_seconds: float | None) -> list[Command]:
        self._flush()
        bodies = self._read()
        while not bodies and not self._closed and timeout_seconds != 0:
            if not self._poll(select.POLLIN | (select.POLLOUT if self._unsent else 0), timeout_seconds):
                break
            self._flush()
            bodies = self._read()
        if self._closed and not bodies:
            raise LinkClosed("the server has closed the connection")
        return [decode_command(body) for body in bodies]

    def send(self, event: Event) -> None:
        data = encode(event)
        if not self._unsent:
            data = data[self._try_send(data) :]
        self._unsent += data

    def flush(self, timeout_seconds: float) -> None:
        """Wait until everything has been handed to the socket, or the other end has gone, or the time is over."""
        self._flush()
        while self._unsent and not self._closed:
            if not self._poll(select.POLLOUT, timeout_seconds):
                return
            self._flush()

    def _poll(self, what: int, timeout_seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self._socket, what)
        return bool(poll.poll(None if timeout_seconds is None else timeout_seconds * 1000))

    def _flush(self) -> None:
        if self._unsent:
            del self._unsent[: self._try_send(self._unsent)]

    def _try_send(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._closed = True
            return len(data)

    def _read(self) -> list[bytes]:
        bodies: list[bytes] = []
        while not self._closed:
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._closed = True
                break
            bodies += self._splitter.feed(data)
        return bodies
