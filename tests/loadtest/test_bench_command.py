"""The command line against a live scripted server in real time, and the client's own cost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.cli import main
from loadtest.launch import LaunchedServer, ServerSpec
from loadtest.report import CompareReport, RunReport, SweepReport, read_report

_SCRIPTED = f"{sys.executable} -m loadtest.scripted_server --port {{port}}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = LaunchedServer(ServerSpec("s", command=f"{_SCRIPTED} --ttft-seconds 0.02 --gap-seconds 0.01"))
    asyncio.run(server.healthy(30.0))
    yield server.url
    server.stop()


def test_run_prints_tables_and_writes_the_report(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--url", url, "-w", "smoke", "-o", str(tmp_path), "--objective", "ttft=5"]) == 0
    shown = capsys.readouterr().out
    assert "time to first token" in shown
    assert "8 ok of 8" in shown
    report = read_report(tmp_path / "report.json")
    assert isinstance(report, RunReport)
    assert report.setup.tokens_counted_by == "the server's /tokenize"
    assert report.setup.model == "scripted"
    assert main(["show", str(tmp_path / "report.json")]) == 0
    assert "8 ok of 8" in capsys.readouterr().out


def test_json_is_one_line_for_machines(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--url", url, "--sessions", "2", "--json", "--tokenizer", "words"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["summary"]["num_ok"] == 2


def test_sweep_finds_a_rate(url: str, tmp_path: Path) -> None:
    arguments = ["sweep", "--url", url, "--sessions", "5", "--from-rate", "20", "--max-runs", "2"]
    assert main([*arguments, "--objective", "e2e=5", "-o", str(tmp_path)]) == 0
    report = read_report(tmp_path / "report.json")
    assert isinstance(report, SweepReport)
    assert (report.rates, report.knee_rate) == ((20.0, 40.0), 40.0)


def test_compare_starts_servers_and_simulate_reads_the_result(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [f"--server=continuous={url}", f"--server=static={_SCRIPTED} --gap-seconds 0.02"]
    arguments = ["compare", *servers, "--sessions", "2", "--warmup", "1", "--max-retries", "0", "-o", str(tmp_path)]
    assert main(arguments) == 0
    report = read_report(tmp_path / "report.json")
    assert isinstance(report, CompareReport)
    assert len(report.runs) == 6
    assert report.startup_seconds.keys() == {"static"}
    assert report.runs[-1].server.peak_rss_bytes is None or report.runs[-1].server.peak_rss_bytes > 1e6
    cost = tmp_path / "cost.json"
    sizes = ["--batch-sizes", "1,2", "--prompt-lengths", "8"]
    assert main(["cost", "--url", url, *sizes, "-o", str(cost)]) == 0
    assert json.loads(cost.read_text())["decode"][0][1] == pytest.approx(0.01, rel=0.5)
    assert main(["simulate", str(tmp_path / "report.json"), "--cost", str(cost)]) == 0
    assert "smoke: 16 seats" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "--url", "http://192.0.2.1"], "--allow-remote"),
        (["run", "-w", "nothing"], "no workload 'nothing'"),
        (["run", "--url", "http://127.0.0.1:9"], "nothing answers"),
        (["sweep"], "needs an --objective"),
        (["compare", "--server", "a=http://127.0.0.1:9"], "at least twice"),
        (["show", "/no/such/report.json"], "cannot read the report"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert complaint in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("flag", ["--objective=speed=1", "--body=[1]", "--rate=x"])
def test_a_bad_flag_is_refused(flag: str) -> None:
    with pytest.raises(SystemExit) as error:
        main(["run", flag])
    assert error.value.code == 2


def test_the_module_runs_as_a_program_and_lists_what_there_is() -> None:
    done = subprocess.run([sys.executable, "-m", "loadtest", "list"], capture_output=True, text=True, check=True)
    assert "sharegpt" in done.stdout
    assert "batching" in done.stdout


@pytest.mark.slow  # a share of a core: meaningful on a quiet machine alone
def test_the_client_takes_under_a_quarter_of_a_core_at_64_streams(url: str, tmp_path: Path) -> None:
    """64 streams of 100 tokens/s, one chunk a token: 6,400 events a second."""
    arguments = ["run", "--url", url, "-w", "w2", "--users", "64", "--sessions", "128", "--quiet"]
    assert main([*arguments, "-o", str(tmp_path)]) == 0
    report = read_report(tmp_path / "report.json")
    assert isinstance(report, RunReport)
    assert report.summary.in_flight_max == 64
    assert report.client.cpu_share < 0.25


def test_ended_by_a_signal_it_ends_the_servers_it_started(tmp_path: Path) -> None:
    """SIGTERM in the middle of a comparison: exit at once, and the server's port is free again."""
    command = f"{_SCRIPTED} --gap-seconds 5"
    arguments = [sys.executable, "-m", "loadtest", "compare", f"--server=a={command}", f"--server=b={command}"]
    bench = subprocess.Popen([*arguments, "--sessions", "1", "--warmup", "0"], stderr=subprocess.PIPE, text=True)
    servers: list[int] = []
    while len(servers) < 2:
        assert bench.poll() is None
        servers = _children(bench.pid)
    bench.send_signal(signal.SIGTERM)
    bench.communicate(timeout=60)
    assert bench.returncode == 130
    for pid in servers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_recorded_trace_is_replayed(url: str, tmp_path: Path) -> None:
    """Three arrivals over 2 s, replayed ten times as fast."""
    trace = tmp_path / "trace.csv"
    trace.write_text("at_seconds,prompt_tokens,output_tokens\n5,10,2\n6,20,3\n7,30,4\n")
    arguments = ["run", "--url", url, "--trace", str(trace), "--speed", "10", "-o", str(tmp_path), "--quiet"]
    assert main(arguments) == 0
    report = read_report(tmp_path / "report.json")
    assert isinstance(report, RunReport)
    assert [(row.scheduled_at, row.prompt_tokens, row.output_tokens) for row in report.requests] == [
        (0.0, 10, 2),
        (0.1, 20, 3),
        (0.2, 30, 4),
    ]
