"""What the tests of the bench share: records made by hand, and runs against a scripted server in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from loadtest.counters import WordCounter
from loadtest.machine import Machine
from loadtest.progress import NoProgress
from loadtest.prompts import make_prompt_maker
from loadtest.records import Request, RequestRecord
from loadtest.report import RunReport
from loadtest.run import Options, Server, make_plan, run_plan
from loadtest.scripted_server import Script, ScriptedServer
from loadtest.target import make_target
from loadtest.workloads import Load, Manners, RequestClass, Workload
from tests.loadtest.virtual_time import run_virtual

MACHINE = Machine(cpu="test", num_cpus=2, memory_bytes=1 << 30, system="test", python="3")
_Value = TypeVar("_Value")


def present(value: _Value | None) -> _Value:
    """A figure that this test knows to exist."""
    assert value is not None
    return value


def record(
    scheduled_at: float = 0.0,
    token_times: Sequence[float] = (),
    ended_at: float | None = None,
    *,
    label: str = "request",
    error: str | None = None,
    manners: Manners = Manners.NORMAL,
    prompt_tokens: int = 10,
    sent_at: float | None = None,
) -> RequestRecord:
    """One record; it ends with its last token unless told otherwise."""
    if ended_at is None:
        ended_at = token_times[-1]
    return RequestRecord(
        request=Request(label, 0, 0, (("user", "the word"),), len(token_times), prompt_tokens, manners),
        scheduled_at=scheduled_at,
        sent_at=scheduled_at if sent_at is None else sent_at,
        ended_at=ended_at,
        token_times=tuple(token_times),
        prompt_tokens=prompt_tokens,
        completion_tokens=len(token_times),
        status=200,
        error=error,
    )


def workload(load: Load, sessions: int, *classes: RequestClass, endpoint: str = "completions") -> Workload:
    """A workload with one class of 8 tokens in and 4 out, unless classes are given."""
    return Workload(
        name="test",
        description="test",
        sessions=sessions,
        load=load,
        classes=classes or (RequestClass(name="request", prompt=8, output=4),),
        endpoint=endpoint,
    )


def run_scripted(
    script: Script,
    what: Workload,
    options: Options | None = None,
    *,
    max_running: int = 1_000_000,
    seed: int = 1,
) -> tuple[RunReport, ScriptedServer]:
    """Runs a workload against a scripted server in virtual time; without warm-up unless the options say so."""
    options = options or Options(warmup=0)

    async def main() -> tuple[RunReport, ScriptedServer]:
        server = ScriptedServer(script, max_running)
        url = await server.start()
        try:
            plan = make_plan(what, seed, make_prompt_maker(WordCounter()), options.warmup)
            clock = asyncio.get_running_loop().time
            report = await run_plan(plan, Server("scripted", make_target(url)), options, MACHINE, NoProgress(), clock)
        finally:
            await server.stop()
        return report, server

    return run_virtual(main())
