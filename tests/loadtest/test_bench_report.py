"""Reports: the stable JSON, the tables, the self-contained page, the plots."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadtest import page
from loadtest.compare import verdicts
from loadtest.errors import BenchError
from loadtest.metric_names import SOURCES
from loadtest.report import CompareReport, Report, RunReport, SweepReport, encode, json_schema, read_report
from loadtest.run import Options
from loadtest.scrape import make_series, parse_metrics
from loadtest.scripted_server import Answer
from loadtest.summary import Objective
from loadtest.tables import markdown, tables
from loadtest.workloads import Closed, RequestClass
from tests.loadtest.bench_kit import MACHINE, run_scripted, workload

_SCHEMA = Path(__file__).parents[2] / "docs" / "loadtest.schema.json"


@pytest.fixture(scope="module")
def run_report() -> RunReport:
    options = Options(warmup=1, objective=Objective(ttft_seconds=0.2))
    classes = (RequestClass(name="<b>a</b>", prompt=8, output=4), RequestClass(name="b", prompt=8, output=4))
    what = workload(Closed(users=2), 12, *classes)
    report, _ = run_scripted(lambda i, _: Answer(0.1, 0.6, status=429 if i == 7 else 200), what, options)
    return report


@pytest.fixture(scope="module")
def compare_report() -> CompareReport:
    runs = []
    for seed in (1, 2, 3):
        for name, gap in (("slow", 0.2), ("fast", 0.1), ("same", 0.2)):
            report, _ = run_scripted(lambda *_: Answer(0.1, gap), workload(Closed(users=1), 2), seed=seed)  # noqa: B023
            runs.append(replace(report, setup=replace(report.setup, name=name)))
    servers = ("slow", "fast", "same")
    return CompareReport("2026-01-01T00:00:00+00:00", servers, 3, tuple(runs), verdicts(runs, servers), {}, MACHINE)


@pytest.fixture(scope="module")
def sweep_report(run_report: RunReport) -> SweepReport:
    runs = (run_report, run_report)
    return SweepReport("2026-01-01T00:00:00+00:00", Objective(ttft_seconds=1.0), 0.99, (1.0, 2.0), runs, 1.0, MACHINE)


@pytest.fixture(params=["run_report", "compare_report", "sweep_report"])
def report(request: pytest.FixtureRequest) -> Report:
    found: Report = request.getfixturevalue(request.param)
    return found


def test_a_report_is_read_back_as_it_was(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(encode(report))
    assert read_report(path) == report


def test_the_schema_in_the_docs_is_the_schema_of_the_code() -> None:
    """A change here is a new version of the schema: `octavo bench schema > docs/loadtest.schema.json`."""
    assert json.loads(_SCHEMA.read_text()) == json_schema()


def test_a_file_of_another_kind_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for text in ("{}", '{"schema": "octavo.bench.run/0"}', "not json"):
        path.write_text(text)
        with pytest.raises(BenchError, match="cannot read the report"):
            read_report(path)


class _Loads(HTMLParser):
    """Collects what a browser would fetch, and unescaped tags."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_complete_in_itself(report: Report, tmp_path: Path) -> None:
    files = page.write_report(report, tmp_path)
    html = (tmp_path / "report.html").read_text()
    loads = _Loads()
    loads.feed(html)
    assert loads.sources
    assert all(source.startswith("data:image/png;base64,") for source in loads.sources)
    assert "b" not in loads.tags  # the class name <b>a</b> is text
    assert not re.search(r"https?://(?!127\.0\.0\.1)", html)
    for file in files:
        assert file.stat().st_size > 500
        assert file.suffix != ".png" or file.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_page_says_what_is_missing(
    run_report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtest.page.util.find_spec", lambda name: None)
    files = page.write_report(run_report, tmp_path)
    assert sorted(file.name for file in files) == ["report.html", "report.json"]
    assert "octavo[bench]" in (tmp_path / "report.html").read_text()


def test_the_tables_of_a_run_show_latencies_failures_and_classes(run_report: RunReport) -> None:
    shown = {table.title: table for table in tables(run_report)}
    latency = next(iter(shown.values()))
    assert [row[0] for row in latency.rows] == [
        "time to first token",
        "inter-token gap",
        "time per output token",
        "end to end",
    ]
    assert latency.rows[0][1:3] == ("100", "100")
    assert ("http_429", "1") in shown["Failures"].rows
    assert len(shown["By class of request"].rows) == 2


def test_the_comparison_names_a_winner_only_where_there_is_one(compare_report: CompareReport) -> None:
    (table,) = tables(compare_report)
    winners = {row[0]: row[-1] for row in table.rows}
    assert winners["gap p50, ms"] == "fast"
    assert winners["ttft p50, ms"] == "none: overlap"
    two = replace(compare_report, repetitions=2, runs=compare_report.runs[:6])
    two = replace(two, verdicts=verdicts(two.runs, two.servers))
    assert {row[-1] for row in tables(two)[0].rows} == {"none: too few", ""}


def test_a_comparison_of_several_classes_tells_how_each_fared(run_report: RunReport, tmp_path: Path) -> None:
    """12 requests of 0.1 s + 3 × 0.6 s on two connections, one of them refused: 1.9 s each, in either class."""
    runs = tuple(replace(run_report, setup=replace(run_report.setup, name=name)) for name in ("one", "two"))
    report = CompareReport(
        "2026-01-01T00:00:00+00:00", ("one", "two"), 1, runs, verdicts(runs, ("one", "two")), {}, MACHINE
    )
    table = tables(report)[1]
    assert table.title == "test: completion by class"
    assert [row[:2] for row in table.rows] == [(s, c) for s in ("one", "two") for c in ("all", "<b>a</b>", "b")]
    assert table.rows[0][2:] == ("12", "1.90", "1.90", "1.90", "0.10")
    assert "test-classes.png" in [file.name for file in page.write_report(report, tmp_path)]
    assert markdown(table).splitlines()[2:5] == [
        "| server | class | requests | mean s | p50 s | p99 s | longest wait for the first token, s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| one | all | 12 | 1.90 | 1.90 | 1.90 | 0.10 |",
    ]


def test_the_sweep_marks_its_knee(sweep_report: SweepReport) -> None:
    (table,) = tables(sweep_report)
    assert "knee at 1 requests/s" in table.title
    assert [row[-1] for row in table.rows] == ["◀ knee", ""]


def test_the_pages_of_four_servers_are_understood() -> None:
    octavo = 'octavo_kv_blocks{group="0",state="free"} 5.0\noctavo_kv_blocks{group="1",state="free"} 7.0\n'
    assert parse_metrics(octavo) == {"kv_free_blocks": 12.0}
    vllm = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="m"} 3.0\n'
    assert parse_metrics(vllm) == {"running": 3.0}
    assert parse_metrics("sglang:num_queue_reqs 2\n") == {"waiting": 2.0}
    assert parse_metrics("llamacpp:requests_processing 1\nllamacpp:requests_deferred 4\n") == {
        "running": 1.0,
        "waiting": 4.0,
    }
    assert parse_metrics("unrelated_total 1\n") == {}


def test_a_figure_missing_from_one_sample_is_none_there() -> None:
    series = make_series([(0.0, {"running": 1.0}), (1.0, {"running": 2.0, "waiting": 3.0})])
    assert series.values == {"running": (1.0, 2.0), "waiting": (None, 3.0)}


def test_octavos_own_metrics_exist_under_the_names_looked_for() -> None:
    """The bench imports nothing of the server; this keeps the two in step."""
    from engine.types import KVGroupStats, StepStats
    from monitoring.metrics import Metrics

    step = StepStats(1, 2, 3, 4, 5, (KVGroupStats(6, 7, 8, 9),), 0, 0, 10, 11, 0, 12, 0, 0)
    found = parse_metrics(Metrics("0", lambda: step).render()[0].decode())
    expected = {name for name, sources in SOURCES.items() if any(s.metric.startswith("octavo_") for s in sources)}
    assert set(found) == expected
    assert (found["running"], found["kv_cached_blocks"], found["preemptions"]) == (2.0, 9.0, 12.0)


def test_the_ceiling_of_one_stream_is_bandwidth_over_weights(run_report: RunReport) -> None:
    """30 GB/s over 100 MB is 300 tokens/s; the run's streams decode 1/0.6 s = 1.67."""
    machine = replace(MACHINE, read_bytes_per_second=30e9)
    setup = replace(run_report.setup, weight_bytes=100_000_000)
    figures = tables(replace(run_report, machine=machine, setup=setup))[1]
    rows = {row[0]: row[1] for row in figures.rows}
    assert rows["memory read ceiling"] == "30.0 GB/s"
    assert rows["one stream's decode ceiling"] == "300 tok/s, 1% reached"


def test_a_run_in_which_everything_failed_still_has_its_page(tmp_path: Path) -> None:
    report, _ = run_scripted(lambda *_: Answer(status=500), workload(Closed(users=2), 4))
    page.write_report(report, tmp_path)
    assert ("http_500", "4") in {row for table in tables(report) for row in table.rows}
    assert "0 ok of 4" in (tmp_path / "report.html").read_text()
