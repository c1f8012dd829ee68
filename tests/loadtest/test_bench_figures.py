"""From records to figures, and from figures to verdicts: numbers that can be checked by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from loadtest.catalogue import MEASURES
from loadtest.compare import judge, strongest, verdicts
from loadtest.measures import summarise
from loadtest.memory import memory_use
from loadtest.report import RequestRow, RunReport
from loadtest.scripted_server import Answer
from loadtest.stats import concurrency, distribution, slope
from loadtest.summary import Goodput, Objective
from loadtest.sweep import find_knee
from loadtest.workloads import Closed, Manners
from tests.loadtest.bench_kit import present, record, run_scripted, workload
from tests.loadtest.virtual_time import run_virtual

_MEASURES = {measure.name: measure for measure in MEASURES}
_RATE, _LATENCY = _MEASURES["requests/s"], _MEASURES["ttft p50"]


def test_percentiles_interpolate_between_order_statistics() -> None:
    found = present(distribution([4.0, 1.0, 3.0, 2.0]))
    assert (found.count, found.mean, found.min, found.max) == (4, 2.5, 1.0, 4.0)
    assert (found.p50, found.p90, found.p99) == pytest.approx((2.5, 3.7, 3.97))
    assert (found.percentiles[0], found.percentiles[50], found.percentiles[100]) == (1.0, 2.5, 4.0)
    assert distribution([]) is None


def test_concurrency_counts_half_open_intervals() -> None:
    times, numbers = concurrency([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)])
    assert times.tolist() == [0.0, 1.0, 2.0, 2.0, 3.0, 4.0]
    assert numbers.tolist() == [1, 2, 1, 2, 1, 0]


def test_slope_is_least_squares() -> None:
    assert slope([0, 1, 2], [1, 3, 5]) == pytest.approx(2.0)
    assert slope([1], [5]) == 0.0


def test_a_summary_of_nothing_is_all_zero() -> None:
    summary = summarise([])
    assert (summary.num_requests, summary.requests_per_second, summary.latencies.e2e) == (0, 0.0, None)


def test_refused_nonsense_is_ok_but_not_in_the_latencies() -> None:
    records = [record(0.0, [0.1, 0.2]), record(0.0, ended_at=9.0, manners=Manners.MALFORMED)]
    summary = summarise(records)
    e2e = present(summary.latencies.e2e)
    assert (summary.num_ok, summary.num_served, e2e.count, e2e.max) == (2, 1, 1, 0.2)


def test_interference_splits_the_gaps_at_the_intrusion() -> None:
    stream = record(0.0, [1.0, 2.0, 3.0, 6.0, 7.0, 8.0], label="stream")
    intruders = [
        record(3.5, [5.0, 5.5], label="in", prompt_tokens=100),
        record(3.5, [6.5], label="in", prompt_tokens=50),
    ]
    found = present(summarise([stream, *intruders], background="stream").interference)
    before, during = present(found.gap_before), present(found.gap_during)
    assert before.percentiles[100] == 1.0
    assert (during.max, during.count) == (3.0, 2)  # 3 → 6 spans its begin, 6 → 7 its end
    assert (found.intrusion_seconds, found.prefill_seconds, found.chunks_during) == (3.0, 3.0, 1)
    assert found.prefill_tokens_per_second == 50.0


def test_a_winner_needs_ranges_that_do_not_touch() -> None:
    better = judge("w", _RATE, ("a", [10, 11, 12]), ("b", [20, 22, 24]))
    assert (better.outcome, better.ratio, better.ratio_low, better.ratio_high) == ("better", 2.0, 2.0, 2.0)
    assert judge("w", _LATENCY, ("a", [10, 11, 12]), ("b", [20, 22, 24])).outcome == "worse"
    assert judge("w", _RATE, ("a", [10, 11, 13]), ("b", [13, 22, 24])).outcome == "no winner: the spreads overlap"
    assert judge("w", _RATE, ("a", [10, 11]), ("b", [20, 22])).outcome == "no winner: fewer than 3 repetitions"


def test_the_strongest_beats_every_other() -> None:
    assert strongest(_RATE, {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}) == "c"
    assert strongest(_LATENCY, {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}) == "a"
    assert strongest(_RATE, {"a": [1, 2, 3], "b": [4, 5, 8], "c": [7, 8, 9]}) is None
    assert strongest(_RATE, {"a": [1, 2], "b": [4, 5]}) is None


def test_verdicts_pair_the_repetitions_of_each_workload() -> None:
    def runs(name: str, gap: float) -> list[RunReport]:
        found = []
        for seed in (1, 2, 3):
            report, _ = run_scripted(lambda *_: Answer(0.1, gap), workload(Closed(users=1), 2), seed=seed)
            setup = replace(report.setup, name=name)
            found.append(replace(report, setup=setup))
        return found

    found = {v.measure: v for v in verdicts(runs("slow", 0.2) + runs("fast", 0.1), ["slow", "fast"])}
    assert found["gap p50"].ratio == pytest.approx(0.5)
    assert found["gap p50"].outcome == "better"
    assert found["ttft p50"].outcome.startswith("no winner")
    assert "goodput" not in found


def test_the_knee_is_found_by_doubling_and_halving() -> None:
    """A server that keeps the objective up to 5/s: 1, 2, 4, 8 fails, 6 fails, 5 holds."""
    report, _ = run_scripted(lambda *_: Answer(), workload(Closed(users=1), 1))
    tried: list[float] = []

    async def run_at(rate: float) -> RunReport:
        tried.append(rate)
        goodput = Goodput(Objective(), num_within=0, share=1.0 if rate <= 5 else 0.5, requests_per_second=0.0)
        return replace(report, summary=replace(report.summary, goodput=goodput))

    runs, knee = run_virtual(find_knee(run_at, 1.0, 0.99, 6))
    assert (tried, knee, list(runs)) == ([1.0, 2.0, 4.0, 8.0, 6.0, 5.0], 5.0, [1.0, 2.0, 4.0, 5.0, 6.0, 8.0])


def test_paging_wastes_what_the_arithmetic_says() -> None:
    """Eight requests of 50 … 400 tokens: 56.25 % used when reserved to the longest, 87.89 % with blocks of 64."""
    rows = [_row(prompt_tokens=tokens - 1) for tokens in range(50, 401, 50)]
    use = memory_use(rows, block_size=64)
    assert use.efficiency(use.reserved) == pytest.approx(0.5625)
    assert use.efficiency(use.paged) == pytest.approx(0.8789, abs=1e-4)
    fine = memory_use(rows, block_size=16)
    assert fine.efficiency(fine.paged) == pytest.approx(1800 / 1856)


def _row(prompt_tokens: int) -> RequestRow:
    return RequestRow(
        label="r",
        session=0,
        turn=0,
        scheduled_at=0.0,
        sent_at=0.0,
        ended_at=1.0,
        max_tokens=1,
        prompt_tokens=prompt_tokens,
        output_tokens=1,
        cached_tokens=None,
        status=200,
        finish_reason="length",
        error=None,
        detail="",
        token_times=(0.0, 1.0),
    )
