"""One client floods, leaves, sends nonsense and reads slowly; the stream of another does not feel it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.live import ROOT, LiveServer, serving

NUM_CLIENTS = 8
SECONDS = 6.0
ROUNDS = 3
MAX_RATIO = 1.5
COMPLETIONS = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
BAD_BODIES: tuple[bytes, ...] = (
    b"{",
    b'{"prompt": 5}',
    b'{"prompt": "a", "temperature": -1}',
    json.dumps({"prompt": "word " * 20000}).encode(),
)

Statuses = Counter[int]
Client = Callable[[httpx.AsyncClient, int, Statuses], Coroutine[Any, Any, None]]


async def well_behaved(http: httpx.AsyncClient, number: int, statuses: Statuses) -> None:
    """One stream after the other, read to the end."""
    while True:
        async with http.stream("POST", COMPLETIONS, json=LONG) as response:
            statuses[response.status_code] += 1
            async for _ in response.aiter_bytes():
                pass


async def attack(http: httpx.AsyncClient, number: int, statuses: Statuses) -> None:
    """Two of each kind: many requests at once, streams that are left, nonsense, readers that hardly read."""
    kind = number % 4
    while True:
        if kind == 0:
            answers = [http.post(COMPLETIONS, json=LONG | {"stream": False, "max_tokens": 20}) for _ in range(20)]
            statuses.update(response.status_code for response in await asyncio.gather(*answers))
        elif kind == 1:
            async with http.stream("POST", COMPLETIONS, json=LONG) as response:
                statuses[response.status_code] += 1
                await anext(response.aiter_bytes(), b"")
        elif kind == 2:
            for body in BAD_BODIES:
                headers = {"content-type": "application/json"}
                statuses[(await http.post(COMPLETIONS, content=body, headers=headers)).status_code] += 1
        else:
            with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError):  # it is cut off
                async with http.stream("POST", COMPLETIONS, json=LONG | {"n": 4}) as response:
                    statuses[response.status_code] += 1
                    async for _ in response.aiter_bytes(64):
                        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def crowd(server: LiveServer, client: Client, statuses: Statuses) -> AsyncIterator[None]:
    """NUM_CLIENTS clients of one key, for as long as the block runs."""
    limits, headers = httpx.Limits(max_connections=None), {"authorization": "Bearer CROWD"}
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits, headers=headers) as http:
        tasks = [asyncio.create_task(client(http, number, statuses)) for number in range(NUM_CLIENTS)]
        yield
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


async def p99_gap(server: LiveServer) -> float:
    """Of a bystander's stream, read by a process of its own."""
    command = [sys.executable, "-m", "tests.e2e.stream_probe", "127.0.0.1", str(server.port), "BYSTANDER"]
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"reading\n"
    await asyncio.sleep(SECONDS)
    gaps = json.loads((await process.communicate(b""))[0])
    assert len(gaps) > 100
    return float(sorted(gaps)[math.ceil(len(gaps) * 0.99) - 1])


@pytest.mark.slow
async def test_an_attack_is_not_worse_than_as_many_well_behaved_streams(default_model_path: Path) -> None:
    flags = ("--executor", "fake", "--fake-step-seconds", "0.01", "--slow-reader-seconds", "2")
    keys = ("--api-key", "crowd=CROWD", "--api-key", "bystander=BYSTANDER", "--max-streams-per-key", "8")
    seen: dict[str, list[float]] = {"well behaved": [], "attack": []}
    statuses: Statuses = Counter()
    with serving(*flags, *keys) as server:
        for _ in range(ROUNDS):
            for name, client in (("well behaved", well_behaved), ("attack", attack)):
                async with crowd(server, client, statuses):
                    seen[name].append(await p99_gap(server))
    assert {200, 400, 429} <= set(statuses) <= {200, 400, 429}
    medians = {name: statistics.median(gaps) for name, gaps in seen.items()}
    print({name: [round(gap * 1e3, 1) for gap in gaps] for name, gaps in seen.items()}, dict(statuses))  # noqa: T201
    assert medians["attack"] <= MAX_RATIO * medians["well behaved"]
