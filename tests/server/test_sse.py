"""Streams, byte for byte, with hand-written receive and send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from server.errors import EngineFailed
from server.http_protocol import ABORT_EXTENSION
from server.sse import COMMENT, DONE, EventStream, error_frame, frame, named_frame


class Client:
    """The other end of an ASGI connection."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.arrived = asyncio.Event()
        self.cut = False
        self.reads_only = -1  # messages until it stops reading

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.messages.append(message)
        if len(self.messages) == self.reads_only:
            self.reads.clear()
        self.arrived.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    def scope(self) -> dict[str, Any]:
        def cut() -> None:
            self.cut = True

        return {"type": "http", "extensions": {ABORT_EXTENSION: cut}}


class Frames:
    """A source of frames that knows whether it was closed."""

    def __init__(self, *items: bytes | Exception, then_wait: bool = False) -> None:
        self.items = items
        self.then_wait = then_wait
        self.closed = False

    async def __call__(self) -> AsyncGenerator[bytes]:
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                yield item
            if self.then_wait:
                await asyncio.Event().wait()
        finally:
            self.closed = True


def stream(source: Frames, comment_seconds: float = 60, slow_reader_seconds: float = 60) -> EventStream:
    return EventStream(
        source(), comment_seconds=comment_seconds, slow_reader_seconds=slow_reader_seconds, on_error=error_frame
    )


async def run(response: EventStream, client: Client) -> None:
    async with asyncio.timeout(5):
        await response(client.scope(), client.receive, client.send)


async def test_the_bytes_are_those_of_the_frames_with_lf_line_ends() -> None:
    client, source = Client(), Frames(frame(b'{"a":1}'), named_frame("x", b"{}"), DONE)
    await run(stream(source), client)
    assert client.body == b'data: {"a":1}\n\nevent: x\ndata: {}\n\ndata: [DONE]\n\n'
    start = client.messages[0]
    headers = dict(start["headers"])
    assert start["status"] == 200
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    assert b"content-length" not in headers
    assert client.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert source.closed


async def test_an_error_before_the_first_frame_keeps_its_own_status() -> None:
    client = Client()
    with pytest.raises(EngineFailed):
        await run(stream(Frames(EngineFailed("no"))), client)
    assert client.messages == []


async def test_an_error_after_the_first_frame_is_one_event_and_the_end() -> None:
    client = Client()
    await run(stream(Frames(frame(b"{}"), EngineFailed("it broke"), frame(b"{}"))), client)
    _, error, rest = client.body.split(b"\n\n")
    assert rest == b""
    assert json.loads(error.removeprefix(b"data: ")) == {
        "error": {"message": "it broke", "type": "server_error", "param": None, "code": "engine_error"}
    }
    assert client.messages[-1]["more_body"] is False


async def test_silence_is_filled_with_comments_also_before_the_first_frame() -> None:
    client, source = Client(), Frames(then_wait=True)
    task = asyncio.create_task(run(stream(source, comment_seconds=0.01), client))
    while client.body.count(COMMENT) < 2:
        client.arrived.clear()
        await client.arrived.wait()
    client.gone.set()
    await task
    assert client.messages[0]["status"] == 200
    assert client.body.replace(COMMENT, b"") == b""
    assert COMMENT == b": keep-alive\n\n"


async def test_a_client_that_leaves_closes_the_source() -> None:
    client, source = Client(), Frames(frame(b"1"), then_wait=True)
    task = asyncio.create_task(run(stream(source), client))
    await client.arrived.wait()
    client.gone.set()
    await task
    assert source.closed
    assert not client.cut


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    client, source = Client(), Frames(frame(b"1"), frame(b"2"), then_wait=True)
    client.reads_only = 2
    await run(stream(source, slow_reader_seconds=0.02), client)
    assert client.body == frame(b"1")
    assert source.closed
    assert client.cut


async def test_cancelling_the_response_closes_the_source() -> None:
    client, source = Client(), Frames(frame(b"1"), then_wait=True)
    task = asyncio.create_task(run(stream(source), client))
    await client.arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed
