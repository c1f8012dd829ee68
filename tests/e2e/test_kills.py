"""The engine is killed, stopped, starved of memory while 32 streams run on the real model with the native kernels: each
ends with the very text, logprobs and finish reason of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("kernels.native._native", reason="the native kernels are not built")

from tests.e2e.live import LiveServer, serving
from tests.e2e.mixed_streams import Answer, mixed_streams, read_all

NUM_STREAMS = 32
MAX_TOKENS = 20
STREAMS = mixed_streams(NUM_STREAMS, MAX_TOKENS)
# 3,000 tokens, each reported with 20 alternatives: memory that an engine which may take no more does not have
HEAVY: dict[str, Any] = {
    "prompt": [1000 + number % 3000 for number in range(3000)],
    "max_tokens": 5,
    "temperature": 0,
    "prompt_logprobs": 20,
}

Hurt = Callable[[httpx.AsyncClient, int], Awaitable[None]]


@pytest.fixture(scope="module")
def server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("flight-records")
    with serving(
        *("--kernels", "native", "--max-model-len", "4096", "--kv-cache-memory", "512MiB"),
        *("--step-timeout-seconds", "8", "--first-step-timeout-seconds", "8"),
        *("--flight-record-dir", str(folder)),
    ) as server:
        yield server


@pytest.fixture
async def http(server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        yield client


async def record(http: httpx.AsyncClient) -> dict[str, Any]:
    response = await http.get("/debug/engine")
    found: dict[str, Any] = response.json()
    return found


async def kill(http: httpx.AsyncClient, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def stop(http: httpx.AsyncClient, pid: int) -> None:
    """It lives, and does nothing any more."""
    os.kill(pid, signal.SIGSTOP)


async def starve(http: httpx.AsyncClient, pid: int) -> None:
    """From now on every allocation that needs new memory fails; then one comes that does."""
    address_space = 4096 * int(Path(f"/proc/{pid}/statm").read_text().split()[0])  # noqa: ASYNC240
    resource.prlimit(pid, resource.RLIMIT_AS, (address_space, address_space))
    response = await http.post("/v1/completions", json=HEAVY)
    assert len(response.json()["choices"][0]["prompt_logprobs"]) == len(HEAVY["prompt"])


class Disturber:
    """Hurts the engine again and again, each time after it has got somewhere."""

    def __init__(self, http: httpx.AsyncClient, hurt: Hurt, count: int, rng: random.Random) -> None:
        self.num_left = count
        self._http = http
        self._hurt = hurt
        self._rng = rng
        self._num_chunks = 0

    def on_chunk(self) -> None:
        self._num_chunks += 1

    async def run(self) -> None:
        while self.num_left:
            before = self._num_chunks
            wanted = self._rng.randint(1, 60)  # chunks of all streams: from the first step to the fifth or so
            while self._num_chunks < before + wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            found = await record(self._http)
            if found["state"] != "ready":
                continue
            self.num_left -= 1
            await self._hurt(self._http, found["pid"])
            await until_another(self._http, found["life"])


async def until_another(http: httpx.AsyncClient, life: int) -> None:
    async with asyncio.timeout(120):
        while (await record(http))["life"] == life:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def rounds_with(http: httpx.AsyncClient, hurt: Hurt, count: int, expected: list[Answer]) -> None:
    """Run all streams, again and again, until the engine has been hurt so often."""
    before = await record(http)
    disturber = Disturber(http, hurt, count, random.Random(count))
    disturbing = asyncio.create_task(disturber.run())
    try:
        while disturber.num_left:
            answers = await read_all(http, STREAMS, disturber.on_chunk)
            assert answers == expected
        await disturbing
    finally:
        disturbing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disturbing
    after = await record(http)
    assert after["counters"]["restarts"] - before["counters"]["restarts"] == count
    assert after["counters"]["failed_choices"] == 0
    assert after["open_requests"] == []


@pytest.fixture(scope="module")
def undisturbed(server: LiveServer) -> list[Answer]:
    """What the streams say when nothing happens."""

    async def run() -> list[Answer]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
            return await read_all(http, STREAMS)

    return asyncio.run(run())


def test_the_streams_are_mixed() -> None:
    bodies = [stream.body for stream in STREAMS]
    for wanted in ("stop", "n", "logprobs", "logit_bias", "frequency_penalty", "messages", "prompt", "seed"):
        assert sum(wanted in body for body in bodies) >= 4, wanted
    assert sum(body["temperature"] == 0 for body in bodies) == NUM_STREAMS // 2


async def test_five_kills(server: LiveServer, http: httpx.AsyncClient, undisturbed: list[Answer]) -> None:
    await rounds_with(http, kill, 5, undisturbed)
    assert server.log.count("its last steps are in") == 5


@pytest.mark.slow
async def test_fifty_kills(http: httpx.AsyncClient, undisturbed: list[Answer]) -> None:
    await rounds_with(http, kill, 50, undisturbed)


@pytest.mark.slow
async def test_five_stops(http: httpx.AsyncClient, undisturbed: list[Answer]) -> None:
    await rounds_with(http, stop, 5, undisturbed)


@pytest.mark.slow
async def test_five_failed_allocations(http: httpx.AsyncClient, undisturbed: list[Answer]) -> None:
    await rounds_with(http, starve, 5, undisturbed)
