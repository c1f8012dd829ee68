"""What scripts/headline_figures.py works out from reports, on reports whose figures are known."""

from __future__ import annotations

from msgspec.structs import replace

from loadtest.compare import verdicts
from loadtest.report import CompareReport, RunReport
from loadtest.scripted_server import Answer
from loadtest.workloads import Closed, RequestClass
from scripts.headline_figures import FIGURES, HEADLINES, chunking, order, prefix, steps
from tests.loadtest.bench_kit import MACHINE, run_scripted, workload


def comparison(*runs: tuple[str, RunReport]) -> CompareReport:
    """One repetition; the first server is the baseline."""
    named = tuple(replace(run, setup=replace(run.setup, name=name)) for name, run in runs)
    servers = tuple(name for name, _ in runs)
    return CompareReport("2026-01-01T00:00:00+00:00", servers, 1, named, verdicts(named, servers), {}, MACHINE)


def run(ttft: float, gap: float, *, cached: int | None = None) -> RunReport:
    """Eight requests in turn, 96 shared tokens and 32 own; all but the first hit `cached`."""
    kind = RequestClass(name="r", shared=96, prompt=32, output=5)
    report, _ = run_scripted(lambda *_: Answer(ttft, gap), workload(Closed(users=1), 8, kind))
    rows = [replace(row, cached_tokens=cached if number else 0) for number, row in enumerate(report.requests)]
    return replace(report, requests=tuple(rows))


def test_the_hit_rate_counts_from_the_second_request() -> None:
    said = prefix(comparison(("off", run(1.2, 0.1)), ("on", run(0.3, 0.1, cached=96))))
    assert "Hit rate behind the first request: 0.7500; P/(P+U) = 0.7500 (+0.00%)" in said
    assert "off ÷ on: 4.0; (P+U)/U = 4.0" in said


def test_the_best_possible_is_what_a_pool_for_all_gives() -> None:
    """Seven of eight requests hit 48, or 96, of 128 tokens."""
    said = order(comparison(("lpm", run(1.0, 0.1, cached=48)), ("all-fit", run(1.0, 0.1, cached=96))))
    assert "lpm 0.328, 50% of the best possible; all-fit 0.656, 100% of the best possible" in said


def test_each_step_is_set_against_the_one_before() -> None:
    """A request of five tokens takes 1.4 s, 0.9 s and 0.45 s."""
    said = steps(comparison(("one", run(1.0, 0.1)), ("two", run(0.5, 0.1)), ("three", run(0.25, 0.05))))
    assert said.splitlines()[2:] == [
        "| one | 3.6 | 1.00 | 1.00 |",
        "| two | 5.6 | 1.56 | 1.56 |",
        "| three | 11.1 | 2.00 | 3.11 |",
    ]


def test_total_time_is_set_against_the_whole_prompts() -> None:
    assert "chunked 1.10" in chunking(comparison(("whole", run(1.0, 0.1)), ("chunked", run(1.14, 0.1))))


def test_the_headlines_are_among_the_figures() -> None:
    assert set(HEADLINES) <= FIGURES.keys()
