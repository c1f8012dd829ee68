"""The raw-socket client: event framing, keep-alive, bodies of every framing, broken peers."""

from __future__ import annotations

import asyncio
import json

import pytest

from loadtest.client import Client
from loadtest.connection import ConnectionLost
from loadtest.counters import WordCounter
from loadtest.payload import generation_request
from loadtest.prompts import make_prompt_maker
from loadtest.sessions import build_sessions
from loadtest.sse import SseReader
from loadtest.stream import AnswerReader
from loadtest.target import make_target
from loadtest.workloads import Closed, RequestClass
from tests.loadtest.bench_kit import record, workload
from tests.loadtest.virtual_time import run_virtual

_STREAM = b': hello\n\ndata: {"a": 1}\n\nevent: x\ndata: two\ndata: lines\n\ndata:tight\n\ndata: [DONE]\n\n'
_EVENTS = [b'{"a": 1}', b"two\nlines", b"tight", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_events_are_whole_however_the_bytes_are_cut(size: int, newline: bytes) -> None:
    reader, data = SseReader(), _STREAM.replace(b"\n", newline) + b"\n"
    events = [event for i in range(0, len(data), size) for event in reader.feed(data[i : i + size])]
    assert events == _EVENTS


def test_an_answer_counts_text_and_not_chunks() -> None:
    """A role chunk, an empty delta and a usage chunk are no tokens; reasoning text is."""
    reader = AnswerReader(lambda: None)
    reader.on_head(200, {"content-type": "text/event-stream"})
    deltas = ['{"role": "assistant", "content": ""}', '{"reasoning_content": "hm"}', '{"content": "yes"}', "{}"]
    for now, delta in enumerate(deltas):
        reader.on_body(b'data: {"choices": [{"delta": %s}]}\n\n' % delta.encode(), float(now))
    reader.on_body(b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n', 4.0)
    reader.on_body(b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n', 5.0)
    reader.finish()
    assert (reader.token_times, reader.text, reader.ended_at) == ([1.0, 2.0], "hmyes", 5.0)
    assert (reader.completion_tokens, reader.finish_reason, reader.error) == (2, "stop", None)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'data: {"error": {"message": "boom"}}\n\n', "stream_error"),
        (b"data: not json\n\n", "protocol"),
        (b"data: [1, 2]\n\n", "protocol"),
        (b'data: {"choices": [{"text": "a"}]}\n\n', "truncated"),
    ],
)
def test_a_stream_that_goes_wrong_is_named(body: bytes, error: str) -> None:
    reader = AnswerReader(lambda: None)
    reader.on_head(200, {"content-type": "text/event-stream; charset=utf-8"})
    reader.on_body(body, 0.0)
    reader.finish()
    assert reader.error == error


def test_an_answer_that_is_no_stream_is_named() -> None:
    reader = AnswerReader(lambda: None)
    reader.on_head(200, {"content-type": "application/json"})
    reader.on_body(b'{"choices": []}', 0.0)
    reader.finish()
    assert (reader.error, reader.detail) == ("not_streamed", '{"choices": []}')


def _fetch(replies: list[bytes], num_fetches: int) -> tuple[list[tuple[int, bytes] | str], int]:
    """What `fetch` gave against a server that sends reply i to connection i and closes after it if it says so."""

    async def main() -> tuple[list[tuple[int, bytes] | str], int]:
        connections = 0

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            reply = replies[min(connections, len(replies) - 1)]
            connections += 1
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(reply)
                if b"keep" not in reply:
                    break
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(make_target(f"http://127.0.0.1:{port}"), asyncio.get_running_loop().time, "completions")
        results: list[tuple[int, bytes] | str] = []
        for _ in range(num_fetches):
            try:
                results.append(await client.fetch("GET", "/x"))
            except ConnectionLost as error:
                results.append(str(error))
            await asyncio.sleep(0.1)
        client.close()
        server.close()
        await server.wait_closed()
        return results, connections

    return run_virtual(main())


def test_a_body_may_end_with_the_connection() -> None:
    assert _fetch([b"HTTP/1.1 200 OK\r\n\r\nall of it"], 1) == ([(200, b"all of it")], 1)


def test_a_body_cut_short_is_a_loss() -> None:
    results, _ = _fetch([b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"], 1)
    assert results == ["connection closed by the server"]


def test_bad_http_is_a_loss() -> None:
    results, _ = _fetch([b"SMTP ready\r\n\r\n"], 1)
    assert "bad HTTP" in str(results[0])


def test_an_idle_connection_that_the_server_has_closed_is_replaced() -> None:
    """Each connection answers one request (with a length, so it looks reusable) and is then closed."""
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    assert _fetch([reply], 3) == ([(200, b"ok")] * 3, 3)


def test_a_record_measures_from_when_the_request_was_due() -> None:
    late = record(1.0, [3.0, 3.5], sent_at=2.0)
    assert (late.ttft_seconds, late.e2e_seconds, late.gaps, late.tpot_seconds) == (2.0, 2.5, (0.5,), 0.5)


def test_a_class_of_requests_has_fields_and_a_key_of_its_own() -> None:
    """Its fields go over those that all have, a server's over both: None takes one out that it would refuse."""
    one = RequestClass(name="batch", prompt=4, output=2, body={"priority": 5, "temperature": 0.5}, api_key="mine")
    [session] = build_sessions(workload(Closed(users=1), 1, one), 1, 1, make_prompt_maker(WordCounter()))
    target = make_target("http://127.0.0.1:1", api_key="ours")
    head, _, body = generation_request(target, session.request(0, ()), "completions").partition(b"\r\n\r\n")
    assert b"authorization: Bearer mine" in head.split(b"\r\n")
    assert (json.loads(body)["priority"], json.loads(body)["temperature"], json.loads(body)["max_tokens"]) == (
        5,
        0.5,
        2,
    )
    strict = make_target("http://127.0.0.1:1", extra_body={"priority": None})
    assert b"priority" not in generation_request(strict, session.request(0, ()), "completions")
