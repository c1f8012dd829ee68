"""`octavo bench`: run, compare, sweep, cost, simulate, show, list, schema."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop
from rich.console import Console

from loadtest.arguments import check, parser
from loadtest.client import Client
from loadtest.counters import make_counter
from loadtest.errors import BenchError
from loadtest.interleave import Comparison, Interleaving
from loadtest.launch import parse_server
from loadtest.machine import describe_machine
from loadtest.page import write_report
from loadtest.presets import Preset, Variant, builtin_presets, find_preset
from loadtest.progress import BarProgress, NoProgress, Progress
from loadtest.prompts import PromptMaker, make_prompt_maker
from loadtest.report import Report, RunReport, SweepReport, encode, json_schema, now, read_report
from loadtest.run import Options, Plan, Server, make_plan, run_plan, with_model
from loadtest.runner import Bounds
from loadtest.step_cost import measure_step_cost
from loadtest.sweep import find_knee
from loadtest.tables import print_tables, tables
from loadtest.target import Target, make_target
from loadtest.whatif import read_cost, simulation_tables
from loadtest.workloads import Closed, Load, Open, Replay, Workload, builtin_workloads, load_workloads

_Result = TypeVar("_Result")
_WHOLE_TRACE = 1_000_000  # sessions at most


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 if something went wrong (said on stderr), 2 for a bad command line."""
    args = parser().parse_args(argv)
    console = Console()
    try:
        check(args)
        return _COMMANDS[args.command](args, console)
    except BenchError as error:
        Console(stderr=True).print(f"octavo bench: {error}", style="bold red", markup=False, highlight=False)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


def _run(args: argparse.Namespace, console: Console) -> int:
    workload = _single_workload(args)
    target = _target(args, args.url)

    async def work() -> RunReport:
        plan = make_plan(workload, args.seed, await _maker(args, target), args.warmup)
        return await _once(args, plan, target, _progress(args))

    return _finish(args, _drive(work()), console)


def _compare(args: argparse.Namespace, console: Console) -> int:
    preset = find_preset(args.preset) if args.preset else None
    specs = [parse_server(text) for text in args.server] or (preset.servers(args.serve, args.weights) if preset else [])
    if preset and not args.workload:
        args.workload = list(preset.workloads)
    workloads = _workloads(args)
    progress = _progress(args)
    comparison = Comparison(
        specs,
        lambda name, url: _target(args, url, preset, name),
        _options(args, every_token=False),
        Interleaving(args.repetitions, args.one_at_a_time, args.health_timeout, args.max_foreign_cpu, args.max_retries),
        describe_machine(measure_bandwidth=args.ceiling),
        progress,
        time.perf_counter,
    )
    makers: list[PromptMaker] = []
    plans: dict[tuple[int, int], Plan] = {}

    async def plan_of(index: int, seed: int, server: Server) -> Plan:
        if not makers:  # learnt once, from the server that is first: the lengths are then the same for all
            makers.append(await _maker(args, server.target))
        if (index, seed) not in plans:
            plans[index, seed] = make_plan(workloads[index], seed, makers[0], args.warmup)
        plan = plans[index, seed]
        few = preset.variant(server.name).sessions if preset and server.name in preset.variants else None
        return plan if few is None else replace(plan, sessions=plan.sessions[:few], times=plan.times[:few])

    return _finish(args, _drive(comparison.run(len(workloads), args.seed, plan_of)), console)


def _sweep(args: argparse.Namespace, console: Console) -> int:
    workload = _single_workload(args)
    target, progress = _target(args, args.url), _progress(args)
    seeds: list[int] = []

    async def work() -> SweepReport:
        maker = await _maker(args, target)

        async def run_at(rate: float) -> RunReport:
            progress.note(f"{rate:g} sessions per second")
            at_rate = msgspec.structs.replace(workload, load=Open(rate=rate, burstiness=args.burstiness))
            seeds.append(args.seed + len(seeds))  # its own prompts, or a rate would find those of the one before cached
            return await _once(args, make_plan(at_rate, seeds[-1], maker, args.warmup), target, progress)

        runs, knee = await find_knee(run_at, args.from_rate, args.attainment, args.max_runs)
        return SweepReport(
            created=now(),
            objective=args.objective,
            attainment=args.attainment,
            rates=tuple(runs),
            runs=tuple(runs.values()),
            knee_rate=knee,
            machine=describe_machine(measure_bandwidth=args.ceiling),
        )

    return _finish(args, _drive(work()), console)


def _cost(args: argparse.Namespace, console: Console) -> int:
    target = _target(args, args.url)

    async def work() -> bytes:
        maker = await _maker(args, target)
        clock = time.perf_counter
        with closing(Client(await with_model(target), clock, "completions", args.timeout)) as client:
            cost = await measure_step_cost(
                client,
                maker,
                clock,
                _progress(args),
                args.batch_sizes,
                args.prompt_lengths,
                args.context_tokens,
                args.seed,
            )
        return msgspec.json.format(msgspec.json.encode(cost), indent=1)

    args.output.write_bytes(_drive(work()) + b"\n")
    console.print(f"wrote {args.output}", highlight=False)
    return 0


def _simulate(args: argparse.Namespace, console: Console) -> int:
    report = read_report(args.report)
    print_tables(console, simulation_tables(report, read_cost(args.cost), args.max_num_seqs, args.token_budget))
    return 0


def _show(args: argparse.Namespace, console: Console) -> int:
    return _finish(args, read_report(args.report), console)


def _list(args: argparse.Namespace, console: Console) -> int:
    for name, workload in _known_workloads(args.workload_file).items():
        console.print(f"[bold]{name:16}[/] {workload.description}", highlight=False)
    console.print("\npresets of compare:")
    for name, preset in builtin_presets().items():
        console.print(f"[bold]{name:16}[/] {preset.description}: {', '.join(preset.variants)}", highlight=False)
    return 0


def _schema(args: argparse.Namespace, console: Console) -> int:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(json_schema()), indent=1).decode() + "\n")
    return 0


_COMMANDS = {
    "run": _run,
    "compare": _compare,
    "sweep": _sweep,
    "cost": _cost,
    "simulate": _simulate,
    "show": _show,
    "list": _list,
    "schema": _schema,
}


def _drive(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs to the end; SIGTERM cancels, so that servers that were started are ended."""

    async def main() -> _Result:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    return uvloop.run(main())


async def _once(args: argparse.Namespace, plan: Plan, target: Target, progress: Progress) -> RunReport:
    options = _options(args, every_token=args.command == "run" and not args.compact)
    machine = describe_machine(measure_bandwidth=args.ceiling or options.weight_bytes is not None)
    server = Server(target.base_url.partition("//")[2], target)
    return await run_plan(plan, server, options, machine, progress, time.perf_counter)


def _finish(args: argparse.Namespace, report: Report, console: Console) -> int:
    if args.json:
        sys.stdout.write(encode(report).decode() + "\n")
    else:
        print_tables(console, tables(report))
    if args.output is not None:
        files = write_report(report, args.output)
        Console(stderr=True).print(f"wrote {', '.join(str(file) for file in files)}", highlight=False)
    return 0


def _known_workloads(path: Path | None) -> dict[str, Workload]:
    return builtin_workloads() | (load_workloads(path) if path is not None else {})


def _workloads(args: argparse.Namespace) -> list[Workload]:
    known, load = _known_workloads(args.workload_file), _load(args)
    chosen = []
    for name in args.workload or ["smoke"]:
        if name not in known:
            raise BenchError(f"no workload {name!r}; there are {', '.join(known)}")
        workload = known[name]
        chosen.append(
            msgspec.structs.replace(
                workload,
                load=load or workload.load,
                sessions=args.sessions or (_WHOLE_TRACE if isinstance(load, Replay) else workload.sessions),
                endpoint=args.endpoint or workload.endpoint,
            )
        )
    return chosen


def _single_workload(args: argparse.Namespace) -> Workload:
    workloads = _workloads(args)
    if len(workloads) > 1:
        raise BenchError("one workload at a time here; `compare` takes several")
    return workloads[0]


def _load(args: argparse.Namespace) -> Load | None:
    """The load that the command line asks for; None: the workload's own."""
    if args.command == "sweep":
        return None
    if args.users:
        return Closed(users=args.users)
    if args.rate:
        return Open(rate=args.rate, burstiness=args.burstiness)
    if args.trace:
        return Replay(path=args.trace, speed=args.speed)
    return None


def _options(args: argparse.Namespace, *, every_token: bool) -> Options:
    return Options(
        bounds=Bounds(args.duration, args.grace, args.max_in_flight),
        warmup=args.warmup,
        request_timeout_seconds=args.timeout,
        objective=args.objective,
        every_token=every_token,
        weight_bytes=args.weight_bytes if args.command == "run" else None,
        report_when_interrupted=args.command == "run",
    )


def _target(args: argparse.Namespace, url: str, preset: Preset | None = None, name: str = "") -> Target:
    variant = preset.variant(name) if preset and name in preset.variants else Variant()
    return make_target(
        url,
        allow_remote=args.allow_remote,
        model=args.model,
        api_key=args.api_key or (preset.api_key if preset else None),
        extra_body=args.body | dict.fromkeys(variant.drop),
    )


async def _maker(args: argparse.Namespace, target: Target) -> PromptMaker:
    target = await with_model(target)

    def learn() -> PromptMaker:
        with closing(make_counter(args.tokenizer, target.base_url, target.headers, target.model)) as counter:
            return make_prompt_maker(counter)

    return await asyncio.to_thread(learn)


def _progress(args: argparse.Namespace) -> Progress:
    console = Console(stderr=True)
    return BarProgress(console) if console.is_terminal and not args.quiet else NoProgress()
