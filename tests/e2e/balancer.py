"""A load balancer in small: asks its backends whether they are ready, tries the next one where one refuses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

_PROBE_SECONDS = 0.1


class Balancer:
    """Round robin over the backends that said they are ready. A request that a backend refuses with a 503, or that
    cannot be handed over, goes to another; once an answer has begun it is passed on as it comes."""

    def __init__(self, ports: list[int]) -> None:
        self._ready = dict.fromkeys(ports, False)
        self._turn = itertools.cycle(ports)
        self.num_passed_on = dict.fromkeys(ports, 0)  # answers, by backend
        self.num_refused = 0  # by a backend; the client did not notice
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The base URL, for as long as the block runs."""

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._tasks.add(asyncio.create_task(self._serve(reader, writer)))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._tasks.add(asyncio.create_task(self._probe()))
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _probe(self) -> None:
        while True:
            for port in self._ready:
                async with _asked(port, b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n") as (head, _):
                    self._ready[port] = b" 200 " in head
            await asyncio.sleep(_PROBE_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _read_request(reader)
            await self._pass_on(request, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            await _close(writer)

    async def _pass_on(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        for _ in range(600):
            port = next((port for port in itertools.islice(self._turn, len(self._ready)) if self._ready[port]), None)
            if port is not None:
                async with _asked(port, request) as (head, rest):
                    if head and b" 503 " not in head:
                        self.num_passed_on[port] += 1
                        writer.write(head)
                        while data := await rest.read(1 << 16):
                            writer.write(data)
                            await writer.drain()
                        return
                self.num_refused += 1
            await asyncio.sleep(_PROBE_SECONDS)


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    """Head and body; the connection is said to close, so that its end is the answer's."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    lines = [line for line in head.split(b"\r\n") if line and not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*lines, b"connection: close", b"", b""]) + await reader.readexactly(length)


@contextlib.asynccontextmanager
async def _asked(port: int, request: bytes) -> AsyncIterator[tuple[bytes, asyncio.StreamReader]]:
    """The status line and the reader of what follows; an empty line if nobody answers."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        yield b"", asyncio.StreamReader()
        return
    try:
        writer.write(request)
        head = b""
        with contextlib.suppress(OSError):
            head = await reader.readline()
        yield head, reader
    finally:
        await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
