"""What the front end costs: tokens a second through HTTP over tokens a second of the engine driven directly.

    python -m tests.e2e.front_end_speed [--streams 64] [--tokens 1000]

Both run the scripted executor, whose tokens cost nothing, so that all of the time is the server's, the engine loop's
and the client's. The client reads raw sockets and only counts events; its own processor time is reported. Ends in one
JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import selectors
import socket
import sys
import time
from dataclasses import asdict, dataclass
from typing import cast

import psutil

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.types import GenerationRequest, SamplingParams
from tests.e2e.live import LiveServer, serving

EVENT = b"data: "


@dataclass(frozen=True)
class Speed:
    """One run."""

    streams: int
    tokens: int
    http_tokens_per_second: float
    engine_tokens_per_second: float
    ratio: float
    events: int  # one a token that completes text, and two a stream at its end
    client_cpu_seconds: float
    server_cpu_seconds: float
    engine_cpu_seconds: float
    seconds: float
    loop_lag_p99_seconds: float  # the bucket's upper edge
    loop_lag_samples: int


def request(tokens: int) -> bytes:
    body = json.dumps({"prompt": [5], "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def read_all(port: int, streams: int, tokens: int) -> int:
    """Events of so many streams, read to their ends."""
    selector = selectors.DefaultSelector()
    tails: dict[socket.socket, bytes] = {}
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request(tokens))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
        tails[connection] = b""
    events = 0
    while tails:
        for key, _ in selector.select():
            connection = cast(socket.socket, key.fileobj)
            data = tails[connection] + connection.recv(1 << 16)
            events += data.count(EVENT)
            tails[connection] = data[1 - len(EVENT) :]  # too short for an event, long enough for the start of one
            if data.endswith(b"0\r\n\r\n"):
                selector.unregister(connection)
                connection.close()
                del tails[connection]
    return events


async def drive_engine(streams: int, tokens: int) -> float:
    """Tokens a second of the engine client with nobody behind it."""
    client = EngineClient(EngineConfig("none", executor="fake"))
    await client.start()
    await client.wait_ready()

    async def consume() -> int:
        sampling = SamplingParams(max_tokens=tokens)
        stream = client.submit(GenerationRequest(client.new_request_id(), (5,), sampling, seed=1))
        return sum([len(update.new_token_ids) async for updates in stream for update in updates])

    start = time.perf_counter()
    counts = await asyncio.gather(*[consume() for _ in range(streams)])
    seconds = time.perf_counter() - start
    await client.close()
    assert counts == [tokens] * streams
    return streams * tokens / seconds


def loop_lag(server: LiveServer) -> list[tuple[float, float]]:
    """(upper edge, cumulative count) of the histogram."""
    with server.http() as http:
        text = http.get("/metrics").text
    found = re.findall(r'octavo_event_loop_lag_seconds_bucket{le="([^"]+)"} (\S+)', text)
    return [(float(edge), float(count)) for edge, count in found]


def percentile(before: list[tuple[float, float]], after: list[tuple[float, float]], share: float) -> tuple[float, int]:
    """Of what was observed between two looks: (upper edge of its bucket, number of samples)."""
    counts = [(edge, late - early) for (edge, late), (_, early) in zip(after, before, strict=True)]
    total = counts[-1][1]
    return next(edge for edge, count in counts if count >= share * total), int(total)


def measure(server: LiveServer, streams: int, tokens: int) -> Speed:
    process = psutil.Process(server.process.pid)
    (engine,) = process.children()
    read_all(server.port, streams, 20)  # warm
    lag, cpu = loop_lag(server), [sum(one.cpu_times()[:2]) for one in (process, engine)]
    own, start = time.process_time(), time.perf_counter()
    events = read_all(server.port, streams, tokens)
    seconds = time.perf_counter() - start
    own = time.process_time() - own
    used = [sum(one.cpu_times()[:2]) - before for one, before in zip((process, engine), cpu, strict=True)]
    lag_p99, samples = percentile(lag, loop_lag(server), 0.99)
    through_http = streams * tokens / seconds
    directly = asyncio.run(drive_engine(streams, tokens))
    return Speed(
        streams=streams,
        tokens=tokens,
        http_tokens_per_second=through_http,
        engine_tokens_per_second=directly,
        ratio=through_http / directly,
        events=events,
        client_cpu_seconds=own,
        server_cpu_seconds=used[0],
        engine_cpu_seconds=used[1],
        seconds=seconds,
        loop_lag_p99_seconds=lag_p99,
        loop_lag_samples=samples,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    with serving("--executor", "fake") as server:
        speed = measure(server, options.streams, options.tokens)
    load = os.getloadavg()[0]
    print(f"load average {load:.1f} on {os.cpu_count()} processors", file=sys.stderr)  # noqa: T201
    print(json.dumps(asdict(speed)))  # noqa: T201


if __name__ == "__main__":
    main()
