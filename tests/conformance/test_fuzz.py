"""Malformed HTTP and JSON, and readers that misbehave, against a server that also has a well-behaved client."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.conformance.bystander import TOKENS, Bystander, Seen
from tests.conformance.hostile import COMPLETIONS, KINDS, post
from tests.e2e.live import LiveServer, serving, until

ANSWER_SECONDS = 0.3  # to wait for an answer that may never come, for the request may be incomplete
GAP_SECONDS = 0.5  # that a bystander's stream may pause at most, beside what the machine itself makes it pause
STREAM = json.dumps({"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 4}).encode()
LOUD_STREAM = STREAM[:-1] + b', "logprobs": 5}'  # fills the buffers on the way soon
HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[!-9;-~]+: [^\r\n]*\r\n)*)\r\n")


@pytest.fixture(scope="module")
def server(default_model_path: Path) -> Iterator[LiveServer]:
    """A step takes 5 ms; who is slow is cut off after a second."""
    flags = ("--fake-step-seconds", "0.005", "--head-timeout-seconds", "1", "--slow-reader-seconds", "1")
    with serving("--executor", "fake", "--max-model-len", "4096", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: LiveServer) -> Seen:
    """What a bystander sees when nobody disturbs."""
    with Bystander(server.port) as bystander:
        pass
    seen = bystander.seen
    assert seen.faults == []
    assert [len(answer) for answer in seen.answers] == [TOKENS] * len(seen.answers)
    return seen


@contextlib.contextmanager
def nobody_notices(server: LiveServer, undisturbed: Seen, at_pace: bool = False) -> Iterator[None]:
    """The bystander's answers stay as they are, and afterwards nothing is left behind. Its pace too, where asked: a gap
    is a time, and means something on a machine that does nothing else."""
    process = psutil.Process(server.process.pid)
    num_files = process.num_fds()
    log = len(server.lines)
    with Bystander(server.port) as bystander:
        yield
    seen = bystander.seen
    assert seen.faults == []
    assert [answer for answer in seen.answers if answer != undisturbed.answers[0]] == []
    if at_pace:
        assert seen.longest_gap < GAP_SECONDS + undisturbed.longest_gap
    until(lambda: server.metric("octavo_requests_running") + server.metric("octavo_requests_waiting") == 0, 10)
    until(lambda: process.num_fds() <= num_files + 2, 10)
    assert [line for line in server.lines[log:] if "Traceback" in line or "[error" in line] == []
    with server.http() as http:
        assert http.get("/ready").status_code == 200


def converse(server: LiveServer, data: bytes, draw: Random) -> bytes:
    """Send it in up to three pieces; all that is answered, until the server closes or has said nothing for a while."""
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(3)))
    pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        with contextlib.suppress(ConnectionError):  # refused and closed before all was sent
            for piece in pieces:
                connection.sendall(piece)
        with contextlib.suppress(ConnectionError):
            while select.select([connection], [], [], ANSWER_SECONDS)[0] and (part := connection.recv(1 << 16)):
                received += part
    return received


def check_answers(received: bytes) -> None:
    """Nothing, or whole responses of the API; errors in its shape, and none of them the server's own fault."""
    while received:
        head = HEAD.match(received)
        assert head is not None, received[:300]
        status = int(head[1])
        fields = {name.lower(): value for name, value in re.findall(rb"([^\r\n:]+): ([^\r\n]*)", head[2])}
        rest = received[head.end() :]
        if status == 100:
            received = rest
            continue
        assert status < 500, received[:500]
        if fields.get(b"transfer-encoding") == b"chunked":
            return
        size = int(fields.get(b"content-length", b"0"))
        body, received = rest[:size], rest[size:]
        if status >= 400 and body:
            error = json.loads(body)["error"]
            assert {"message", "type", "param", "code"} <= error.keys()
            assert error["message"]


def attack(server: LiveServer, kind: str, seed: int, num_cases: int) -> list[int]:
    """How many bytes each case was answered with."""

    def one(case: int) -> int:
        draw = Random(f"{kind} {seed} {case}")
        data = KINDS[kind](draw)
        received = converse(server, data, draw)
        try:
            check_answers(received)
        except Exception as error:
            raise AssertionError(f"case {case} of {kind!r}, seed {seed}: {data[:300]!r}: {error}") from error
        return len(received)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, range(num_cases)))


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_requests(server: LiveServer, undisturbed: Seen, kind: str) -> None:
    with nobody_notices(server, undisturbed):
        answered = attack(server, kind, seed=1, num_cases=80)
    assert sum(map(bool, answered)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.parametrize("kind", KINDS)
def test_many_malformed_requests(server: LiveServer, undisturbed: Seen, kind: str, seed: int) -> None:
    with nobody_notices(server, undisturbed, at_pace=True):
        attack(server, kind, seed, num_cases=500)


def test_headers_that_trickle_in(server: LiveServer, undisturbed: Seen) -> None:
    """Fifty connections that send a byte now and then are told off when their time is over."""
    request = b"GET /health HTTP/1.1\r\nHost: x\r\nx-slow: " + b"a" * 1000
    with nobody_notices(server, undisturbed), contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5)) for _ in range(50)]
        for byte in request[:40]:
            with contextlib.suppress(ConnectionError):
                for connection in slow:
                    connection.sendall(bytes([byte]))
            time.sleep(0.02)
        answers = [connection.recv(1 << 16) for connection in slow]
    assert {answer[:12] for answer in answers} == {b"HTTP/1.1 408"}


def open_stream(server: LiveServer, body: bytes = STREAM, buffer_bytes: int | None = None) -> socket.socket:
    """A connection whose answer has begun."""
    connection = socket.socket()
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(post(COMPLETIONS, body))
    assert connection.recv(512).startswith(b"HTTP/1.1 200")
    return connection


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    """Say that nothing more will be sent; then read whatever still comes."""
    with connection, contextlib.suppress(ConnectionError):
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def send_garbage(connection: socket.socket) -> None:
    """Go on talking while the answer comes."""
    with connection, contextlib.suppress(ConnectionError):
        connection.sendall(b"\x00garbage\r\n\r\n" * 100)
        connection.recv(1 << 16)


@pytest.mark.parametrize("leave", [socket.socket.close, reset, half_close, send_garbage], ids=lambda f: f.__name__)
def test_readers_that_leave_in_the_middle(
    server: LiveServer, undisturbed: Seen, leave: Callable[[socket.socket], None]
) -> None:
    with nobody_notices(server, undisturbed):
        for _ in range(3):
            with ThreadPoolExecutor(8) as pool:
                connections = list(pool.map(lambda _: open_stream(server), range(8)))
                list(pool.map(leave, connections))


def test_readers_that_do_not_read(server: LiveServer, undisturbed: Seen) -> None:
    """Each is cut off when it has read nothing for a second; the bystander reads on beside them."""
    with nobody_notices(server, undisturbed), contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(open_stream(server, LOUD_STREAM, buffer_bytes=2048))
        until(lambda: server.metric("octavo_requests_running") > 6, 10)
        until(lambda: server.metric("octavo_requests_running") <= 1, 60)  # the bystander's own


def test_a_reader_that_is_slow_gets_everything(server: LiveServer, undisturbed: Seen) -> None:
    """Slow, but never silent for as long as --slow-reader-seconds."""
    body = json.dumps({"prompt": "a", "max_tokens": 150, "ignore_eos": True, "stream": True}).encode()
    with nobody_notices(server, undisturbed), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post(COMPLETIONS, body, "Connection: close"))
        received = b""
        while part := connection.recv(1024):
            received += part
            time.sleep(0.005)
    assert received.endswith(b"0\r\n\r\n")
    assert b"data: [DONE]" in received


def test_nonsense_within_a_stream_does_not_become_a_part_of_it(server: LiveServer, undisturbed: Seen) -> None:
    """Seen here: the refusal was written between two chunks of the answer, and the answer went on into a closed
    connection, which was an error in the log each time."""
    with nobody_notices(server, undisturbed), open_stream(server) as connection:
        connection.sendall(b"\x00nonsense\r\n\r\n")
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                received += part
    assert b"HTTP/1.1" not in received


def test_a_client_that_leaves_with_a_request_in_the_queue(server: LiveServer, undisturbed: Seen) -> None:
    """Seen here: only the request that had arrived last was told; the one being answered wrote on."""
    with nobody_notices(server, undisturbed):
        connections = [open_stream(server) for _ in range(4)]
        for connection in connections:
            connection.sendall(post(COMPLETIONS, STREAM) * 3)
        until(lambda: server.metric("octavo_requests_running") >= 16, 10)
        for connection in connections:
            connection.close()
        until(lambda: server.metric("octavo_requests_running") <= 1, 10)  # the bystander's own
