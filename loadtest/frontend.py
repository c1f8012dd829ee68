"""What a server's front end costs: many streams at once, read by a client that hardly costs anything itself.

    python -m loadtest.frontend --url http://127.0.0.1:8000 --pid $(pgrep -f 'octavo serve')

Meant for `octavo serve --executor fake`, whose tokens cost next to nothing: what is left is the server. Raw sockets in
one thread; bytes are kept as they come and looked at when the clock has stopped. Meanwhile another connection asks
/health over and over: its worst answers are the event loop's lag (and the client's own, so the figure is an upper
bound). Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson
from msgspec import Struct, to_builtins

from loadtest.errors import BenchError
from loadtest.payload import http_request
from loadtest.proc import process_cpu_seconds
from loadtest.sse import SseReader
from loadtest.target import Target, make_target

_READ_BYTES = 1 << 16
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_STALL_SECONDS = 60.0  # nothing at all arrived for this long: the server is stuck


class FrontEndCost(Struct, frozen=True):
    """One run. CPU figures are microseconds of CPU time per token."""

    endpoint: str
    streams: int
    tokens: int  # that the server says it generated
    events: int  # with text; fewer than tokens where a token ends within a character
    writes: int  # HTTP chunks with events: as many as events if nothing was put together
    seconds: float  # from the first request to the last byte
    events_per_second: float
    client_cpu_us: float
    process_cpu_us: dict[str, float]  # by process: "server" is the one asked for, others are its children by name
    health_p50_ms: float  # round trips of GET /health meanwhile
    health_p99_ms: float
    health_max_ms: float


@dataclass(eq=False, slots=True)
class _Stream:
    """One connection and all that came through it."""

    sock: socket.socket
    request: bytes
    received: list[bytes] = field(default_factory=list)

    def read(self) -> bool:
        """Take what is there; whether the answer is complete."""
        data = self.sock.recv(_READ_BYTES)
        if not data:
            raise BenchError(f"the server closed a stream early: {b''.join(self.received)[-300:]!r}")
        self.received.append(data)
        return data.endswith(_LAST_CHUNK) or (len(data) < len(_LAST_CHUNK) and self._tail().endswith(_LAST_CHUNK))

    def _tail(self) -> bytes:
        return b"".join(self.received[-len(_LAST_CHUNK) :])


@dataclass(eq=False, slots=True)
class _HealthProbe:
    """A keep-alive connection that asks again as soon as it has an answer and the interval is over."""

    sock: socket.socket
    request: bytes
    interval_seconds: float
    asked_at: float = 0.0
    waiting: bool = False
    answer: bytes = b""
    round_trips: list[float] = field(default_factory=list)

    def ask(self, now: float) -> None:
        if not self.waiting and now - self.asked_at >= self.interval_seconds:
            self.asked_at, self.waiting = now, True
            self.sock.sendall(self.request)

    def read(self, now: float) -> None:
        self.answer += self.sock.recv(_READ_BYTES)
        if not self.answer.startswith(b"HTTP/1.1 200"):
            raise BenchError(f"GET /health did not answer 200: {self.answer!r}")
        if self.answer.endswith(b"}"):  # the end of its JSON
            self.round_trips.append(now - self.asked_at)
            self.answer, self.waiting = b"", False


def measure(
    target: Target,
    *,
    streams: int,
    tokens: int,
    endpoint: str = "chat",
    pid: int | None = None,
    probe_seconds: float = 0.005,
) -> FrontEndCost:
    """One run of `streams` answers of `tokens` tokens each. `pid`: the server's process, for its CPU time. Raises
    BenchError if an answer is not what it should be."""
    connections = [_Stream(_connect(target), _request(target, endpoint, tokens, number)) for number in range(streams)]
    probe = _HealthProbe(_connect(target), http_request(target, "GET", "/health"), probe_seconds)
    cpu_before, own_before = _cpu(pid), time.process_time()
    begun_at = time.perf_counter()
    try:
        _read_all(connections, probe)
    finally:
        for stream in connections:
            stream.sock.close()
        probe.sock.close()
    seconds, own = time.perf_counter() - begun_at, time.process_time() - own_before
    cpu_after = _cpu(pid)
    health = [1e3 * round_trip for round_trip in probe.round_trips]
    answers = [_examine(b"".join(stream.received)) for stream in connections]
    total = sum(answer.tokens for answer in answers)
    events = sum(answer.events for answer in answers)
    return FrontEndCost(
        endpoint=endpoint,
        streams=streams,
        tokens=total,
        events=events,
        writes=sum(answer.writes for answer in answers),
        seconds=seconds,
        events_per_second=events / seconds,
        client_cpu_us=own / total * 1e6,
        process_cpu_us={name: (cpu_after[name] - cpu_before[name]) / total * 1e6 for name in cpu_before},
        health_p50_ms=float(np.percentile(health, 50)),
        health_p99_ms=float(np.percentile(health, 99)),
        health_max_ms=max(health),
    )


def _connect(target: Target) -> socket.socket:
    sock = socket.create_connection((target.address, target.port), timeout=_STALL_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _request(target: Target, endpoint: str, tokens: int, number: int) -> bytes:
    prompt = f"Tell story number {number}."
    body = {
        "model": target.model,
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | ({"messages": [{"role": "user", "content": prompt}]} if endpoint == "chat" else {"prompt": prompt})
    known = {key: value for key, value in body.items() if value is not None}
    return http_request(target, "POST", _PATHS[endpoint], orjson.dumps(known))


def _read_all(streams: Sequence[_Stream], probe: _HealthProbe) -> None:
    """Send everything, then read until every stream is complete."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            stream.sock.sendall(stream.request)
            selector.register(stream.sock, selectors.EVENT_READ, stream)
        selector.register(probe.sock, selectors.EVENT_READ, probe)
        num_open = len(streams)
        heard_at = time.perf_counter()
        while num_open:
            now = time.perf_counter()
            probe.ask(now)
            if now - heard_at > _STALL_SECONDS:
                raise BenchError(f"{num_open} streams have been silent for {_STALL_SECONDS:.0f} s")
            for key, _ in selector.select(probe.interval_seconds):
                heard_at = time.perf_counter()
                if key.data is probe:
                    probe.read(heard_at)
                elif key.data.read():
                    selector.unregister(key.fileobj)
                    num_open -= 1


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: int
    events: int
    writes: int


def _examine(raw: bytes) -> _Answer:
    """Counts of one complete answer. Raises BenchError if it is none."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise BenchError(f"refused: {raw[:500]!r}")
    reader = SseReader()
    tokens = events = writes = 0
    for chunk in _http_chunks(rest):
        texts = 0
        for data in reader.feed(chunk):
            event = orjson.loads(data) if data != b"[DONE]" else {"choices": []}
            tokens += (event.get("usage") or {}).get("completion_tokens", 0)
            texts += sum(
                1 for choice in event["choices"] if choice.get("text") or choice.get("delta", {}).get("content")
            )
        events += texts
        writes += texts > 0
    if not tokens:
        raise BenchError("an answer told no usage")
    return _Answer(tokens, events, writes)


def _http_chunks(body: bytes) -> Iterator[bytes]:
    """The data of each chunk of a complete chunked body."""
    position = 0
    while (size := int(body[position : (line_end := body.index(b"\r\n", position))], 16)) > 0:
        yield body[line_end + 2 : line_end + 2 + size]
        position = line_end + 2 + size + 2


def _cpu(pid: int | None) -> dict[str, float]:
    return {} if pid is None else process_cpu_seconds(pid)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.frontend", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, help="the server's process, to report its CPU time")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500, help="of each stream")
    parser.add_argument("--endpoint", choices=sorted(_PATHS), default="chat")
    options = parser.parse_args(arguments)
    try:
        cost = measure(
            make_target(options.url),
            streams=options.streams,
            tokens=options.tokens,
            endpoint=options.endpoint,
            pid=options.pid,
        )
    except (BenchError, OSError) as error:
        parser.exit(1, f"{error}\n")
    sys.stdout.write(json.dumps(to_builtins(cost)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
