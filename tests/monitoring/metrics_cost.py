"""What measuring costs, as a share of the time of a step of the default model.

    python -m tests.monitoring.metrics_cost

A real server with so many streams; its last steps are read from /debug/engine. Recording is timed by the processor's
clock on those very steps; the steps whose operations were timed one by one are held against those around them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import httpx
import msgspec

from engine.types import StepStats
from monitoring.metrics import Metrics
from tests.e2e.live import LiveServer, serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    with serving("--flight-record-steps", "2000") as server:
        for streams in options.streams:
            steps = asyncio.run(_run(server, streams))
            print(  # noqa: T201
                f"{streams} streams: "
                + ", ".join(f"{name} {value}" for name, value in _figures(steps, streams).items())
            )


async def _run(server: LiveServer, streams: int) -> list[StepStats]:
    """The steps of this load that ran a token of each stream and nothing else."""
    body = {"prompt": "Once", "max_tokens": 600, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as http:
        await asyncio.gather(*[http.post("/v1/completions", json=body) for _ in range(streams)])
        record: dict[str, Any] = (await http.get("/debug/engine")).json()
    steps = [msgspec.convert(step["stats"], StepStats) for step in record["steps"] if step["stats"]]
    return [step for step in steps[-590:] if (step.num_decode_tokens, step.num_prefill_tokens) == (streams, 0)]


def _figures(steps: list[StepStats], streams: int) -> dict[str, str]:
    timed = [step.forward_seconds for step in steps if step.kernel_seconds]
    plain = [step.forward_seconds for step in steps if not step.kernel_seconds]
    step_seconds = statistics.median(step.schedule_seconds + step.execute_seconds for step in steps)
    recording = min(_recording_seconds(steps, streams) for _ in range(5)) / len(steps)
    slower = statistics.median(timed) - statistics.median(plain)
    return {
        "a step (ms)": f"{step_seconds * 1e3:.2f}",
        "recording a step and its tokens (µs)": f"{recording * 1e6:.0f}",
        "of a step": f"{recording / step_seconds:.2%}",
        "a timed step is slower by (ms)": f"{slower * 1e3:.2f}, one in 64: {slower / 64 / step_seconds:.3%}",
    }


def _recording_seconds(steps: list[StepStats], streams: int) -> float:
    metrics = Metrics("1", lambda: None)
    begin = time.thread_time()
    for step in steps:
        metrics.step_done(step, streams, 0)
        for _ in range(streams):
            metrics.next_tokens(1, 0.01)
            metrics.tokens_delivered(1)
    return time.thread_time() - begin


if __name__ == "__main__":
    main()
