"""Mixed traffic with aborts, errors and kills for a long time: does anything grow, does anything get slower?

    python scripts/soak.py --minutes 20 -- --max-model-len 2048 --kv-cache-memory 256MiB

starts `octavo serve` with the flags behind `--`, and at the end prints the verdicts and writes what it saw (a sample
every few seconds) as JSON. Exit code 1 if a verdict is no. Linux: memory and descriptors are read from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

SAMPLE_SECONDS = 5.0
NUM_CLIENTS = 6
READY_SECONDS = 300.0
MAX_MEMORY_DRIFT = 0.02  # of the server's resident memory, after the warm-up
MAX_DESCRIPTOR_DRIFT = 8  # connections that happen to be open
MAX_LATENCY_DRIFT = 0.10  # of the probe's median, last minute against first
PROBE = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@dataclass
class Sample:
    """One look at the two processes."""

    at_seconds: float
    server_bytes: int
    server_descriptors: int
    engine_bytes: int
    engine_life: int


@dataclass
class Seen:
    """Everything that the soak has gathered."""

    samples: list[Sample] = field(default_factory=list)
    probes: list[tuple[float, float]] = field(default_factory=list)  # (at seconds, took seconds)
    outcomes: Counter[str] = field(default_factory=Counter)

    def json(self) -> str:
        samples = [asdict(sample) for sample in self.samples]
        return json.dumps({"samples": samples, "probes": self.probes, "outcomes": dict(self.outcomes)}, indent=1)


@contextlib.contextmanager
def serving(flags: list[str], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`octavo serve` on a free port; its process and URL."""
    with log.open("wb") as stderr:
        command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", *flags]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while (
            found := [line.split()[1] for line in log.read_text().splitlines() if line.startswith("serving ")]
        ) == []:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield process, found[0].removesuffix("/v1")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Soak:
    """Clients, a killer and an observer on one event loop."""

    def __init__(self, http: httpx.AsyncClient, server_pid: int, options: argparse.Namespace) -> None:
        self.seen = Seen()
        self._http = http
        self._server_pid = server_pid
        self._start = time.monotonic()
        self._end: float = self._start + 60 * options.minutes
        self._kill_seconds = 60 * options.kill_minutes
        self._warm_up_seconds = 60 * options.warm_up_minutes
        self._rng = random.Random(1)

    @property
    def _over(self) -> bool:
        return time.monotonic() >= self._end

    async def run(self) -> Seen:
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_CLIENTS):
                tasks.create_task(self._client(random.Random(number)))
            tasks.create_task(self._probe())
            tasks.create_task(self._observe())
            tasks.create_task(self._kill())
        return self.seen

    async def _client(self, rng: random.Random) -> None:
        acts = (self._complete, self._leave, self._misbehave)
        while not self._over:
            [act] = rng.choices(acts, (8, 2, 1))
            self.seen.outcomes[await act(rng)] += 1

    async def _complete(self, rng: random.Random) -> str:
        body = self._body(rng)
        response = await self._http.post("/v1/completions", json=body)
        return f"complete {response.status_code}"

    async def _leave(self, rng: random.Random) -> str:
        """Close the connection after a few chunks."""
        body = self._body(rng) | {"stream": True, "max_tokens": 200, "ignore_eos": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            for _ in range(rng.randint(1, 12)):
                if await anext(lines, None) is None:
                    break
            return f"left {response.status_code}"

    async def _misbehave(self, rng: random.Random) -> str:
        bad: list[dict[str, Any]] = [{"temperature": -1}, {"max_tokens": 10**9}, {"prompt": ""}, {"timeout": 0.001}]
        response = await self._http.post("/v1/completions", json=self._body(rng) | rng.choice(bad))
        return f"refused {response.status_code}"

    @staticmethod
    def _body(rng: random.Random) -> dict[str, Any]:
        words = " ".join(rng.choices(("paper", "ink", "page", "fold", "spine", "quire"), k=rng.randint(2, 60)))
        return {
            "prompt": words,
            "max_tokens": rng.randint(4, 32),
            "temperature": rng.choice((0.0, 1.0)),
            "n": rng.choice((1, 1, 1, 2)),
            "seed": rng.randrange(1000),
        }

    async def _probe(self) -> None:
        """One request at a time, always the same: how long it takes beside the others."""
        while not self._over:
            begun = time.monotonic()
            response = await self._http.post("/v1/completions", json=PROBE)
            if response.status_code == 200:
                self.seen.probes.append((begun - self._start, time.monotonic() - begun))
            await asyncio.sleep(0.5)

    async def _observe(self) -> None:
        while not self._over:
            engine = (await self._http.get("/debug/engine")).json()
            if engine["pid"] is not None:
                sample = Sample(
                    time.monotonic() - self._start,
                    resident_bytes(self._server_pid),
                    len(os.listdir(f"/proc/{self._server_pid}/fd")),
                    resident_bytes(engine["pid"]),
                    engine["life"],
                )
                self.seen.samples.append(sample)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _kill(self) -> None:
        """SIGKILL to the engine now and then, but not in the last two minutes. For the first time while the server
        warms up: what it needs for the first restart of its life is no growth."""
        wait_seconds = min(self._kill_seconds, self._warm_up_seconds / 2)
        while self._kill_seconds and time.monotonic() + wait_seconds + 120 < self._end:
            await asyncio.sleep(wait_seconds)
            wait_seconds = self._kill_seconds
            engine = (await self._http.get("/debug/engine")).json()
            if engine["state"] == "ready":
                os.kill(engine["pid"], signal.SIGKILL)
                self.seen.outcomes["killed"] += 1
        while not self._over:  # noqa: ASYNC110
            await asyncio.sleep(1)


def resident_bytes(pid: int) -> int:
    """0 if the process has just gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def verdicts(seen: Seen, warm_up_seconds: float) -> dict[str, tuple[bool, str]]:
    """Name → (held, figures)."""
    warm = [sample for sample in seen.samples if sample.at_seconds >= warm_up_seconds]
    tenth = max(1, len(warm) // 10)
    first, last = warm[:tenth], warm[-tenth:]

    def medians(name: str) -> tuple[float, float]:
        return tuple(statistics.median(getattr(sample, name) for sample in part) for part in (first, last))

    before, after = medians("server_bytes")
    memory = after / before - 1
    few, many = medians("server_descriptors")
    early, late = (
        statistics.median(took for at, took in seen.probes if low <= at < low + 60)
        for low in (warm_up_seconds, seen.probes[-1][0] - 60)
    )
    latency = late / early - 1
    fine = {"killed", "complete 200", "left 200", "refused 400", "refused 504"}
    return {
        "server memory flat": (
            memory < MAX_MEMORY_DRIFT,
            f"{before / 2**20:.1f} → {after / 2**20:.1f} MiB ({memory:+.2%})",
        ),
        "descriptors flat": (many - few <= MAX_DESCRIPTOR_DRIFT, f"{few:g} → {many:g}"),
        "latency steady": (latency <= MAX_LATENCY_DRIFT, f"{early * 1e3:.0f} → {late * 1e3:.0f} ms ({latency:+.1%})"),
        "no other answers": (fine.issuperset(seen.outcomes), str(dict(seen.outcomes))),
    }


async def soak(url: str, server_pid: int, options: argparse.Namespace) -> Seen:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        return await Soak(http, server_pid, options).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default 20)")
    parser.add_argument("--warm-up-minutes", type=float, default=3.0, help="not counted (default 3)")
    parser.add_argument("--kill-minutes", type=float, default=4.0, help="between two kills of the engine; 0: none")
    parser.add_argument("--output", type=Path, default=Path("soak"), help="folder for soak.json and the server's log")
    parser.add_argument("serve_flags", nargs="*", help="flags of octavo serve, behind --")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with serving(options.serve_flags, options.output / "server.log") as (process, url):
        seen = asyncio.run(soak(url, process.pid, options))
    (options.output / "soak.json").write_text(seen.json())
    found = verdicts(seen, 60 * options.warm_up_minutes)
    for name, (held, figures) in found.items():
        print(f"{'yes' if held else 'NO':<4}{name:<22}{figures}")  # noqa: T201
    return 0 if all(held for held, _ in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
