"""One run against one server, from sessions to report."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import Coroutine, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import orjson

from loadtest.arrivals import gamma_arrivals
from loadtest.client import Client
from loadtest.connection import Clock, ConnectionLost
from loadtest.errors import BenchError
from loadtest.health import HealthWatch
from loadtest.machine import Machine
from loadtest.measures import summarise
from loadtest.progress import Progress
from loadtest.prompts import PromptMaker
from loadtest.report import RunReport, Setup, now, request_row
from loadtest.runner import Bounds, Runner
from loadtest.scrape import Scraper
from loadtest.sessions import Session, build_sessions, replayed_sessions
from loadtest.summary import Objective
from loadtest.target import Target
from loadtest.trace import read_trace
from loadtest.workloads import Closed, Intrusion, Open, Replay, Workload

_WARMUP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Options:
    """How to run, whatever the server and the workload."""

    bounds: Bounds = field(default_factory=Bounds)
    warmup: int = 2  # requests before the clock starts, with prompts of their own
    request_timeout_seconds: float = 300.0
    metrics_interval_seconds: float = 0.5
    objective: Objective | None = None
    every_token: bool = True  # keep the time of every chunk in the report
    weight_bytes: int | None = None  # of the served model, to state the ceiling of one stream
    report_when_interrupted: bool = False  # Ctrl-C ends the run early instead of the program (main thread only)


@dataclass(frozen=True, slots=True)
class Server:
    """A server under test."""

    name: str
    target: Target
    command: str | None = None  # that started it, if the bench did
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent: the same for every server that is to be compared."""

    workload: Workload
    seed: int
    sessions: tuple[Session, ...]
    warmup: tuple[Session, ...]
    times: tuple[float, ...]  # open loop: when each session starts; else empty
    tokens_counted_by: str


def make_plan(workload: Workload, seed: int, maker: PromptMaker, warmup: int) -> Plan:
    """Draws sessions, prompts and arrival times from the seed."""
    num = workload.sessions
    match workload.load:
        case Replay(path=path, speed=speed):
            arrivals = read_trace(Path(path), speed, limit=num)
            sessions = replayed_sessions(arrivals, seed, maker)
            times = [arrival.at_seconds for arrival in arrivals]
        case Open(rate=rate, burstiness=burstiness):
            sessions = build_sessions(workload, num, seed, maker)
            times = gamma_arrivals(num, rate, burstiness, Random(f"arrivals/{workload.name}/{seed}"))
        case Closed() | Intrusion():
            sessions = build_sessions(workload, num, seed, maker)
            times = []
    return Plan(
        workload=workload,
        seed=seed,
        sessions=tuple(sessions),
        warmup=tuple(_short(s) for s in build_sessions(workload, warmup, -1 - seed, maker)),
        times=tuple(times),
        tokens_counted_by=maker.counted_by,
    )


async def run_plan(
    plan: Plan, server: Server, options: Options, machine: Machine, progress: Progress, clock: Clock
) -> RunReport:
    """Warms up, runs the plan and reports. Raises BenchError if the server does not answer at all."""
    target = await with_model(server.target, clock)
    endpoint, timeout = plan.workload.endpoint, options.request_timeout_seconds
    with closing(Client(target, clock, endpoint, timeout)) as client, closing(Client(target, clock, endpoint)) as other:
        await _warm_up(plan, client, clock)
        runner = Runner(client, options.bounds, clock)
        watch = HealthWatch(clock, server.pid)
        scraper = Scraper(other, clock, options.metrics_interval_seconds)
        title = f"{server.name} · {plan.workload.name}"
        with _steady_memory(), _stop_on_interrupt(runner, options.report_when_interrupted):
            await _accompanied(_send(plan, runner), watch.run(), scraper.run(), progress.follow(title, runner.live))
            health, use = watch.client([r.sent_at - r.scheduled_at for r in runner.records]), watch.server()
    load = plan.workload.load
    records = sorted(runner.records, key=lambda record: (record.scheduled_at, record.request.session))
    return RunReport(
        created=now(),
        setup=Setup(
            name=server.name,
            url=target.base_url,
            model=target.model,
            command=server.command,
            workload=plan.workload,
            endpoint=plan.workload.endpoint,
            seed=plan.seed,
            warmup=len(plan.warmup),
            tokens_counted_by=plan.tokens_counted_by,
            extra_body=target.extra_body,
            weight_bytes=options.weight_bytes,
        ),
        summary=summarise(records, options.objective, load.background if isinstance(load, Intrusion) else None),
        client=health,
        server=use,
        series=scraper.series(runner.started_at),
        requests=tuple(request_row(record, runner.started_at, every_token=options.every_token) for record in records),
        machine=machine,
    )


async def with_model(target: Target, clock: Clock = time.perf_counter) -> Target:
    """The target with the first model that the server lists, unless one was named."""
    with closing(Client(target, clock, "completions", 30.0)) as client:
        try:
            status, body = await client.fetch("GET", "/v1/models")
            models: Any = orjson.loads(body)["data"] if status == 200 else []
        except (OSError, ConnectionLost) as error:
            raise BenchError(f"nothing answers at {target.base_url}: {error}") from error
        except (orjson.JSONDecodeError, KeyError, TypeError):
            models = []
    if target.model is None and models:
        return replace(target, model=models[0]["id"])
    return target


async def _accompanied(work: Coroutine[Any, Any, None], *helpers: Coroutine[Any, Any, None]) -> None:
    """Runs `work` while the helpers run, and ends them with it. A helper's failure is raised at the end."""
    tasks = [asyncio.create_task(helper) for helper in helpers]
    try:
        await work
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _send(plan: Plan, runner: Runner) -> None:
    match plan.workload.load:
        case Closed(users=users):
            await runner.closed(plan.sessions, users)
        case Intrusion() as load:
            await runner.intrusion(plan.sessions, load)
        case _:
            await runner.open(plan.sessions, plan.times)


async def _warm_up(plan: Plan, client: Client, clock: Clock) -> None:
    """Sends the warm-up one by one. Raises BenchError if none of it is answered: so will be the rest."""
    runner = Runner(client, Bounds(), clock)
    await runner.closed(plan.warmup, 1)
    if runner.records and not any(record.ok for record in runner.records):
        last = runner.records[-1]
        raise BenchError(f"{client.target.base_url} fails every warm-up request: {last.error} {last.detail}".strip())


def _short(session: Session) -> Session:
    turn = session.turns[0]
    return replace(session, turns=(replace(turn, max_tokens=min(turn.max_tokens, _WARMUP_TOKENS)),))


@contextlib.contextmanager
def _steady_memory() -> Iterator[None]:
    """No pause by the garbage collector while times are taken; a run is bounded, so is what piles up."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _stop_on_interrupt(runner: Runner, wanted: bool) -> Iterator[None]:
    """The first Ctrl-C ends the sending, and what was measured is reported; the second interrupts as usual."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        runner.stop()
        loop.remove_signal_handler(signal.SIGINT)

    if wanted:
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        if wanted:
            loop.remove_signal_handler(signal.SIGINT)
