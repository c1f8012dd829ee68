"""Runs a comparison: repetition by repetition, workload by workload, the servers in turn."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from loadtest.compare import verdicts
from loadtest.connection import Clock
from loadtest.launch import LaunchedServer, ServerSpec
from loadtest.machine import Machine
from loadtest.progress import Progress
from loadtest.report import CompareReport, RunReport, now
from loadtest.run import Options, Plan, Server, run_plan
from loadtest.target import Target

PlanOf = Callable[[int, int, Server], Awaitable[Plan]]  # (number of the workload, seed, server whose turn it is)


@dataclass(frozen=True, slots=True)
class Interleaving:
    """How servers take turns. One gets load at a time; the order rotates, so that none is always first."""

    repetitions: int = 3
    one_at_a_time: bool = False  # start each server for its turn only, instead of keeping all of them up
    health_timeout_seconds: float = 600.0
    max_foreign_cpu_cores: float = 0.15  # a run disturbed by more than this is made again …
    max_retries: int = 2  # … so often at most; the quietest attempt counts


class Comparison:
    """Runs all turns. `make_target` checks and resolves the URL of the named server: (name, url)."""

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        make_target: Callable[[str, str], Target],
        options: Options,
        interleaving: Interleaving,
        machine: Machine,
        progress: Progress,
        clock: Clock,
    ) -> None:
        self._specs = tuple(specs)
        self._make_target = make_target
        self._options = options
        self._interleaving = interleaving
        self._machine = machine
        self._progress = progress
        self._clock = clock
        self._startup_seconds: dict[str, float] = {}

    async def run(self, num_workloads: int, seed: int, plan_of: PlanOf) -> CompareReport:
        """Repetition r uses seed + 1000 r: each has prompts of its own, and `plan_of` must give all servers the
        same plan for the same workload and seed, or its beginning."""
        runs: list[RunReport] = []
        async with contextlib.AsyncExitStack() as stack:
            up: dict[str, Server] = {}
            if not self._interleaving.one_at_a_time:
                for spec in self._specs:
                    up[spec.name] = await stack.enter_async_context(self._up(spec))
            for repetition in range(self._interleaving.repetitions):
                for workload in range(num_workloads):
                    for spec in _rotated(self._specs, repetition):
                        async with self._turn(spec, up) as server:
                            runs.append(await self._quiet_run(server, workload, seed + 1000 * repetition, plan_of))
        names = tuple(spec.name for spec in self._specs)
        return CompareReport(
            created=now(),
            servers=names,
            repetitions=self._interleaving.repetitions,
            runs=tuple(runs),
            verdicts=verdicts(runs, names),
            startup_seconds=self._startup_seconds,
            machine=self._machine,
        )

    async def _quiet_run(self, server: Server, workload: int, seed: int, plan_of: PlanOf) -> RunReport:
        attempts: list[RunReport] = []
        for attempt in range(1 + self._interleaving.max_retries):
            # a repeated attempt needs other prompts, or it would meet its own in the prefix cache
            plan = await plan_of(workload, seed + attempt, server)
            attempts.append(await run_plan(plan, server, self._options, self._machine, self._progress, self._clock))
            disturbance = _disturbance(attempts[-1])
            if disturbance <= self._interleaving.max_foreign_cpu_cores:
                break
            self._progress.note(f"other processes took {disturbance:.2f} cores during that run")
        return min(attempts, key=_disturbance)

    @contextlib.asynccontextmanager
    async def _turn(self, spec: ServerSpec, up: dict[str, Server]) -> AsyncIterator[Server]:
        if spec.name in up:
            yield up[spec.name]
        else:
            async with self._up(spec) as server:
                yield server

    @contextlib.asynccontextmanager
    async def _up(self, spec: ServerSpec) -> AsyncIterator[Server]:
        if spec.url is not None:
            yield Server(spec.name, self._make_target(spec.name, spec.url))
            return
        launched = LaunchedServer(spec)
        self._progress.note(f"starting {spec.name}: {launched.command}")
        try:
            await launched.healthy(self._interleaving.health_timeout_seconds)
            self._startup_seconds.setdefault(spec.name, launched.startup_seconds)
            yield Server(spec.name, self._make_target(spec.name, launched.url), launched.command, launched.pid)
        finally:
            launched.stop()


def _rotated(specs: tuple[ServerSpec, ...], by: int) -> tuple[ServerSpec, ...]:
    by %= len(specs)
    return specs[by:] + specs[:by]


def _disturbance(report: RunReport) -> float:
    return report.server.foreign_cpu_cores or 0.0
