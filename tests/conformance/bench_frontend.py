"""The front end beside the engine driven directly: `python -m tests.conformance.bench_frontend`.

The scripted executor both times, on two CPUs at most. Through HTTP: a server, and a client on raw sockets in a process
of its own (loadtest.frontend). Directly: the same requests to an EngineClient in this process, which takes the
updates and does nothing with them. Rounds alternate, so that a busy machine hits both alike; the best round of
each counts. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

import uvloop

from engine.client import EngineClient, RequestStream
from engine.config import EngineConfig
from engine.types import GenerationRequest, SamplingParams
from tests.e2e.live import LiveServer, serving

PROMPT_TOKENS = 40
NUM_CPUS = 2


def through_http(server: LiveServer, streams: int, tokens: int, endpoint: str) -> dict[str, Any]:
    """What loadtest.frontend.FrontEndCost says."""
    flags = ["--url", server.url, "--pid", str(server.process.pid), "--endpoint", endpoint]
    sizes = ["--streams", str(streams), "--tokens", str(tokens)]
    command = [sys.executable, "-m", "loadtest.frontend", *flags, *sizes]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    cost: dict[str, Any] = json.loads(done.stdout)
    return cost


async def _take(stream: RequestStream) -> int:
    return sum([len(update.new_token_ids) async for updates in stream for update in updates])


async def _drive(streams: int, tokens: int) -> float:
    client = EngineClient(EngineConfig("", executor="fake"))
    await client.start()
    await client.wait_ready()
    begun_at = time.perf_counter()
    requests = [
        GenerationRequest(
            client.new_request_id(), tuple(range(number, number + PROMPT_TOKENS)), SamplingParams(tokens), seed=number
        )
        for number in range(streams)
    ]
    counts = await asyncio.gather(*[_take(client.submit(request)) for request in requests])
    seconds = time.perf_counter() - begun_at
    await client.close()
    return sum(counts) / seconds


def directly(streams: int, tokens: int) -> float:
    """Tokens per second."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_drive(streams, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CPUS])

    rounds: dict[str, list[dict[str, Any]]] = {"chat": [], "completions": []}
    direct: list[float] = []
    with serving("--executor", "fake") as server:
        for _ in range(options.rounds):
            for endpoint, costs in rounds.items():
                costs.append(through_http(server, options.streams, options.tokens, endpoint))
            direct.append(directly(options.streams, options.tokens))
    best = {endpoint: max(costs, key=lambda cost: cost["events_per_second"]) for endpoint, costs in rounds.items()}
    result = {
        "direct_tokens_per_second": max(direct),
        "http": best,
        "ratio": {endpoint: cost["events_per_second"] / max(direct) for endpoint, cost in best.items()},
        "all_rounds": {endpoint: [cost["events_per_second"] for cost in costs] for endpoint, costs in rounds.items()}
        | {"direct": direct},
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
