"""Servers that the bench starts itself, and taking turns between several."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from loadtest.counters import WordCounter
from loadtest.errors import BenchError
from loadtest.interleave import Comparison, Interleaving
from loadtest.launch import LaunchedServer, ServerSpec, parse_server
from loadtest.presets import builtin_presets, find_preset
from loadtest.progress import NoProgress
from loadtest.prompts import make_prompt_maker
from loadtest.report import CompareReport, RunReport
from loadtest.run import Options, Plan, Server, make_plan
from loadtest.scripted_server import Answer, Script, ScriptedServer
from loadtest.target import make_target
from loadtest.workloads import Closed, Workload, builtin_workloads
from server.flags import parse_serve
from tests.loadtest.bench_kit import MACHINE, present, workload
from tests.loadtest.virtual_time import run_virtual

_SCRIPTED = f"{sys.executable} -m loadtest.scripted_server --port {{port}}"


def test_a_server_is_a_url_or_a_command() -> None:
    assert parse_server("a=http://127.0.0.1:1") == ServerSpec("a", url="http://127.0.0.1:1")
    assert parse_server("a=A=1 run --port {port}") == ServerSpec("a", command="A=1 run --port {port}")
    for text in ("a", "=http://x", "a= ", "a=run --port 8000"):
        with pytest.raises(BenchError):
            parse_server(text)


def test_a_launched_server_is_healthy_then_gone() -> None:
    async def main() -> None:
        server = LaunchedServer(ServerSpec("s", command=f"SOME_NAME=1 {_SCRIPTED}"))
        try:
            target = await server.healthy(30.0)
            assert target.base_url == server.url
            assert server.startup_seconds > 0
            assert "SOME_NAME=1" in Path(f"/proc/{server.pid}/environ").read_text()  # noqa: ASYNC240
        finally:
            server.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(server.pid, 0)

    asyncio.run(main())


def test_a_server_that_dies_shows_the_end_of_its_log() -> None:
    code = "import sys; print('no such model'); sys.exit(3)"
    server = LaunchedServer(ServerSpec("s", command=f'{sys.executable} -c "{code}" {{port}}'))
    with pytest.raises(BenchError, match=r"s ended with code 3:\nno such model"):
        asyncio.run(server.healthy(30.0))
    server.stop()


def test_a_server_that_never_listens_is_ended_and_so_are_its_children() -> None:
    server = LaunchedServer(ServerSpec("s", command="sh -c 'sleep 100 & echo $!; sleep 100; echo {port}'"))
    with pytest.raises(BenchError, match=r"s was not healthy within 0\.5 s") as error:
        asyncio.run(server.healthy(0.5))
    child = int(str(error.value).splitlines()[-1])
    for _ in range(100):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":
            break
    else:
        pytest.fail(f"the child {child} still runs")


def test_a_command_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(BenchError, match="cannot start s"):
        LaunchedServer(ServerSpec("s", command="/no/such/program {port}"))


def test_presets_start_octavo_and_know_their_workloads() -> None:
    for preset in builtin_presets().values():
        assert len(preset.variants) >= 2
        assert set(preset.workloads) <= set(builtin_workloads())
    first = find_preset("batching").servers("octavo serve --model x")[0]
    common = "octavo serve --model x --host 127.0.0.1 --port {port} --max-num-seqs 16 --no-prefix-cache"
    assert first == ServerSpec("static", command=f"{common} --batching static")
    for preset in builtin_presets().values():
        for name in preset.variants:
            parse_serve([*preset.flags.split(), *preset.variant(name).flags.split()])  # Octavo has every flag
    with pytest.raises(BenchError, match="there are batching"):
        find_preset("nothing")


def test_a_preset_fills_in_what_only_this_machine_knows() -> None:
    ablation = find_preset("ablation")
    with pytest.raises(BenchError, match="no-kv-reuse needs --weights"):
        ablation.servers("octavo serve")
    commands = [present(spec.command) for spec in ablation.servers("octavo serve", Path("my weights"))]
    generate = f"{sys.executable} -m loadtest.generate_server --model 'my weights' --port {{port}} --no-kv-cache"
    assert commands[0] == generate
    assert sum("--model 'my weights'" in command for command in commands) == len(commands) - 1  # not the quantised one


def _compare(
    interleaving: Interleaving, workloads: Sequence[Workload], scripts: Mapping[str, Script]
) -> tuple[CompareReport, dict[str, list[str]]]:
    """Runs a comparison of scripted servers in virtual time: (report, prompts by server)."""

    async def main() -> tuple[CompareReport, dict[str, list[str]]]:
        servers = {name: ScriptedServer(script) for name, script in scripts.items()}
        specs = [ServerSpec(name, url=await server.start()) for name, server in servers.items()]
        maker = make_prompt_maker(WordCounter())
        comparison = Comparison(
            specs,
            lambda _, url: make_target(url),
            Options(warmup=0, every_token=False),
            interleaving,
            MACHINE,
            NoProgress(),
            asyncio.get_running_loop().time,
        )

        async def plan_of(index: int, seed: int, server: Server) -> Plan:
            return make_plan(workloads[index], seed, maker, 0)

        report = await comparison.run(len(workloads), 1, plan_of)
        for scripted in servers.values():
            await scripted.stop()
        return report, {name: [body["prompt"] for body in server.bodies] for name, server in servers.items()}

    return run_virtual(main())


def test_servers_take_turns_and_get_the_same_prompts() -> None:
    scripts = {name: (lambda *_: Answer(0.1, 0.1)) for name in "abc"}
    workloads = [workload(Closed(users=2), 4)]
    report, prompts = _compare(Interleaving(repetitions=3), workloads, scripts)
    assert [run.setup.name for run in report.runs] == list("abcbcacab")
    assert prompts["a"] == prompts["b"] == prompts["c"]
    assert len(set(prompts["a"])) == 12  # each repetition has its own
    assert all(verdict.outcome.startswith("no winner") for verdict in report.verdicts)
    assert all(len(row.token_times) == 2 for run in report.runs for row in run.requests)


def test_a_disturbed_run_is_made_again_with_other_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs find 0.5, 0.2 and 0.3 cores taken by others: after two more attempts the quietest counts."""
    disturbances = iter([0.5, 0.2, 0.3, 0.0])
    taken: dict[tuple[str, int], float] = {}

    def disturbance(report: RunReport) -> float:
        key = (report.setup.name, report.setup.seed)
        if key not in taken:
            taken[key] = next(disturbances)
        return taken[key]

    monkeypatch.setattr("loadtest.interleave._disturbance", disturbance)
    scripts = {"a": lambda *_: Answer(0.1), "b": lambda *_: Answer(0.1)}
    report, prompts = _compare(Interleaving(repetitions=1), [workload(Closed(users=1), 1)], scripts)
    assert [run.setup.seed for run in report.runs] == [2, 1]  # a's second attempt, b's first
    assert len(prompts["a"]) == 3
