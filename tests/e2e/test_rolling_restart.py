"""Two servers behind a balancer are replaced one after the other while clients go on asking: no request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from pathlib import Path

import httpx

from tests.e2e.balancer import Balancer
from tests.e2e.live import LiveServer, serving
from tests.e2e.mixed_streams import Answer, Stream, read

NUM_CLIENTS = 6
FLAGS = ("--executor", "fake", "--fake-step-seconds", "0.01")


def stream_of(number: int) -> Stream:
    body = {
        "prompt": [5, number],
        "max_tokens": 20 + 30 * (number % 4),
        "ignore_eos": True,
        "n": 1 + number % 2,
        "seed": number,
    }
    return Stream("/v1/completions", body)


def replace(server: LiveServer, running: contextlib.ExitStack) -> None:
    """Stop one server as a rolling update does, and start its successor on the same port."""
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    running.enter_context(serving(*FLAGS, "--port", str(server.port)))


async def test_a_rolling_restart_loses_nothing(default_model_path: Path) -> None:
    with contextlib.ExitStack() as running:
        servers = [running.enter_context(serving(*FLAGS)) for _ in range(2)]
        balancer = Balancer([server.port for server in servers])
        numbers = itertools.count()
        answers: dict[int, Answer] = {}
        over = asyncio.Event()

        async def ask(http: httpx.AsyncClient) -> None:
            while not over.is_set():
                number = next(numbers)
                answers[number] = await read(http, stream_of(number), lambda: None)

        async with balancer.serving() as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
            clients = [asyncio.create_task(ask(http)) for _ in range(NUM_CLIENTS)]
            for server in servers:
                seen = len(answers)
                async with asyncio.timeout(60):
                    while len(answers) < seen + 2 * NUM_CLIENTS:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                await asyncio.to_thread(replace, server, running)
            over.set()
            await asyncio.gather(*clients)
            # Both successors, and both predecessors, would have said the same.
            again = [await read(http, stream_of(number), lambda: None) for number in (0, 1, 2, 3)]
    assert [answers[number] for number in (0, 1, 2, 3)] == again
    assert len(answers) == next(numbers)
    assert all(choice.finish_reason == "length" for answer in answers.values() for choice in answer.values())
    assert all(balancer.num_passed_on.values())
