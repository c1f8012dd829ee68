"""The bench against a server with known delays, in virtual time: what it reports must be exact."""

from __future__ import annotations

import pytest

from loadtest.run import Options
from loadtest.runner import Bounds
from loadtest.scripted_server import Answer
from loadtest.summary import Objective
from loadtest.workloads import Closed, Intrusion, Manners, Open, RequestClass
from tests.loadtest.bench_kit import present, run_scripted, workload

_EXACT = 1e-9  # seconds


def test_percentiles_are_those_of_the_script() -> None:
    """Request i takes (i + 1) × 10 ms to its first token: the percentiles of 0.01 … 1.00 are known."""
    report, _ = run_scripted(lambda i, _: Answer((i + 1) * 0.01, gap_seconds=0.02), workload(Closed(users=1), 100))
    latencies = report.summary.latencies
    ttft, gap, e2e = present(latencies.ttft), present(latencies.gap), present(latencies.e2e)
    assert (ttft.count, gap.count, e2e.count) == (100, 300, 100)
    assert ttft.p50 == pytest.approx(0.505, abs=_EXACT)
    assert ttft.p90 == pytest.approx(0.901, abs=_EXACT)
    assert ttft.p99 == pytest.approx(0.9901, abs=_EXACT)
    assert ttft.max == pytest.approx(1.0, abs=_EXACT)
    assert ttft.mean == pytest.approx(0.505, abs=_EXACT)
    assert (gap.min, gap.max) == pytest.approx((0.02, 0.02), abs=_EXACT)
    assert e2e.p50 == pytest.approx(0.505 + 3 * 0.02, abs=_EXACT)
    assert present(latencies.tpot).p99 == pytest.approx(0.02, abs=_EXACT)


def test_rates_are_tokens_over_the_whole_run() -> None:
    """Four users, eight requests of 0.1 + 3 × 0.1 s: two rounds of 0.4 s."""
    report, _ = run_scripted(lambda *_: Answer(0.1, 0.1), workload(Closed(users=4), 8))
    summary = report.summary
    assert summary.duration_seconds == pytest.approx(0.8, abs=_EXACT)
    assert summary.requests_per_second == pytest.approx(10.0)
    assert summary.output_tokens_per_second == pytest.approx(40.0)
    assert summary.input_tokens_per_second == pytest.approx(80.0)
    assert summary.in_flight_mean == pytest.approx(4.0)
    assert summary.in_flight_max == 4


def test_a_stalled_server_delays_everything_behind_it() -> None:
    """No coordinated omission: one request in a server of one seat takes 10 s; the open loop goes on scheduling every
    100 ms, and each request's latency holds its share of the stall."""
    metronome = Open(rate=10.0, burstiness=1e9)
    report, _ = run_scripted(lambda i, _: Answer(10.0 if i == 5 else 0.0), workload(metronome, 50), max_running=1)
    ttfts = [row.token_times[0] - row.scheduled_at for row in report.requests]
    assert ttfts[4] == pytest.approx(0.0, abs=1e-3)
    assert ttfts[5:] == pytest.approx([10.0 - 0.1 * i for i in range(45)], abs=1e-3)
    assert present(report.summary.latencies.ttft).p50 == pytest.approx(7.55, abs=1e-3)


def test_a_request_that_never_ends_is_counted_with_the_time_waited() -> None:
    options = Options(warmup=0, request_timeout_seconds=30.0)
    report, _ = run_scripted(
        lambda i, _: Answer(0.1, 0.1, stall_after=2 if i == 3 else None), workload(Closed(users=1), 10), options
    )
    summary = report.summary
    assert (summary.num_ok, summary.num_served, summary.num_given_up) == (9, 9, 1)
    assert summary.errors == {"timeout": 1}
    e2e, gap = present(summary.latencies.e2e), present(summary.latencies.gap)
    assert e2e.count == 10
    assert e2e.max == pytest.approx(30.0, abs=_EXACT)
    assert gap.max == pytest.approx(29.8, abs=_EXACT)  # second token at 0.2 s, then nothing


def test_a_dead_server_shows_in_the_first_token_time() -> None:
    options = Options(warmup=0, bounds=Bounds(duration_seconds=5.0, grace_seconds=2.0))
    report, _ = run_scripted(lambda *_: Answer(stall_after=0), workload(Closed(users=2), 10), options)
    assert report.summary.errors == {"unfinished": 2}
    assert present(report.summary.latencies.ttft).p50 == pytest.approx(7.0, abs=_EXACT)
    assert report.summary.requests_per_second == 0


def test_the_run_is_bounded_in_time() -> None:
    """Nothing is sent after 1 s; what runs may end."""
    options = Options(warmup=0, bounds=Bounds(duration_seconds=1.0, grace_seconds=10.0))
    report, server = run_scripted(lambda *_: Answer(0.3, 0.1), workload(Closed(users=1), 1000), options)
    assert server.num_requests == 2  # 0.6 s each; the second ends at 1.2
    assert report.summary.num_ok == 2


def test_open_loop_sends_by_its_schedule_whatever_is_still_running() -> None:
    report, _ = run_scripted(lambda *_: Answer(5.0), workload(Open(rate=4.0), 40))
    rows = report.requests
    assert [row.sent_at for row in rows] == pytest.approx([row.scheduled_at for row in rows], abs=1e-4)
    assert rows[-1].scheduled_at > rows[0].scheduled_at + 5
    assert report.summary.in_flight_max > 10


def test_a_full_client_counts_the_wait_for_a_place() -> None:
    """At most 2 in flight: the third, due at 0.2 s, is sent when the first ends, at 1 s."""
    options = Options(warmup=0, bounds=Bounds(max_in_flight=2))
    report, _ = run_scripted(lambda *_: Answer(1.0), workload(Open(rate=10.0, burstiness=1e9), 3), options)
    third = report.requests[2]
    assert (third.scheduled_at, third.sent_at) == pytest.approx((0.2, 1.0), abs=1e-3)
    assert report.client.send_lag_max_seconds == pytest.approx(0.8, abs=1e-3)
    assert any("fell behind" in warning for warning in report.client.warnings)


def test_growth_of_what_is_in_flight_tells_a_rate_that_cannot_be_held() -> None:
    """One seat at 0.5 s a request serves 2/s: at 1/s nothing grows, at 6/s four a second do."""
    slow, _ = run_scripted(
        lambda *_: Answer(0.5, num_tokens=1), workload(Open(rate=1.0, burstiness=1e9), 60), max_running=1
    )
    fast, _ = run_scripted(
        lambda *_: Answer(0.5, num_tokens=1), workload(Open(rate=6.0, burstiness=1e9), 60), max_running=1
    )
    assert slow.summary.in_flight_growth_per_second == pytest.approx(0.0, abs=0.01)
    assert fast.summary.in_flight_growth_per_second == pytest.approx(4.0, rel=0.05)


def test_warm_up_is_sent_before_and_counted_nowhere() -> None:
    report, server = run_scripted(lambda *_: Answer(0.1), workload(Closed(users=2), 4), Options(warmup=3))
    assert server.num_requests == 7
    assert report.summary.num_requests == 4
    measured = {body["prompt"] for body in server.bodies[3:]}
    assert measured.isdisjoint(body["prompt"] for body in server.bodies[:3])


def test_intruders_come_when_the_background_has_its_tokens() -> None:
    """The stream's 5th token is out at 0.1 + 4 × 0.1 s; two intruders then take 0.25 s to their only token."""
    classes = (
        RequestClass(name="stream", prompt=8, output=20, count=1),
        RequestClass(name="intruder", prompt=100, output=1),
    )
    load = Intrusion(background="stream", after_tokens=5, users=2)
    report, _ = run_scripted(
        lambda _, body: Answer(0.1 if body["max_tokens"] == 20 else 0.25, 0.1), workload(load, 3, *classes)
    )
    assert [row.scheduled_at for row in report.requests] == pytest.approx([0.0, 0.5, 0.5], abs=1e-4)
    found = present(report.summary.interference)
    before, during = present(found.gap_before), present(found.gap_during)
    assert found.intrusion_seconds == pytest.approx(0.25, abs=_EXACT)
    assert found.prefill_tokens_per_second == pytest.approx(200 / 0.25)
    assert (before.count, during.count, found.chunks_during) == (4, 3, 3)


def test_a_chat_carries_the_servers_own_answers() -> None:
    chat = RequestClass(name="chat", prompt=5, output=3, turns=3, shared=4, think_seconds=2.0)
    report, server = run_scripted(lambda *_: Answer(0.5), workload(Closed(users=1), 1, chat, endpoint="chat"))
    roles = [[message["role"] for message in body["messages"]] for body in server.bodies]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant", "user"],
    ]
    assert server.bodies[2]["messages"][2]["content"] == "w0 w1 w2 "
    assert [row.scheduled_at for row in report.requests] == pytest.approx([0.0, 2.5, 5.0], abs=1e-4)


def test_misbehaving_clients_are_judged_by_their_manners() -> None:
    classes = [RequestClass(name=manners.value, prompt=4, output=6, manners=manners, count=1) for manners in Manners]
    report, server = run_scripted(lambda *_: Answer(0.1, 0.1), workload(Closed(users=1), len(Manners), *classes))
    rows = {row.label: row for row in report.requests}
    assert report.summary.errors == {}
    assert (report.summary.num_ok, report.summary.num_served) == (5, 1)
    assert len(rows["leaves"].token_times) == 4
    assert server.num_left == 1
    assert (rows["malformed"].status, rows["impossible"].status) == (400, 400)
    assert rows["dawdles"].output_tokens == 6


def test_each_kind_of_failure_has_its_name() -> None:
    answers = [Answer(status=429), Answer(break_after=2), Answer(with_usage=False), Answer()]
    report, _ = run_scripted(lambda i, _: answers[i], workload(Closed(users=1), 4))
    assert [row.error for row in report.requests] == ["http_429", "disconnected", None, None]
    assert (report.summary.num_without_usage, report.summary.output_tokens) == (1, 8)


def test_goodput_counts_a_failure_as_a_miss() -> None:
    """Of four, one fails, one is slow to start and one gaps: one is within the objective."""
    answers = [Answer(status=500), Answer(0.6, 0.01), Answer(0.1, 0.5), Answer(0.1, 0.01)]
    options = Options(warmup=0, objective=Objective(ttft_seconds=0.5, gap_seconds=0.2))
    report, _ = run_scripted(lambda i, _: answers[i], workload(Closed(users=1), 4), options)
    goodput = present(report.summary.goodput)
    assert (goodput.num_within, goodput.share) == (1, 0.25)


def test_metrics_are_sampled_while_the_run_is_on() -> None:
    report, _ = run_scripted(lambda *_: Answer(1.0, 1.0), workload(Closed(users=3), 3), max_running=2)
    assert report.series.times[:3] == pytest.approx((0.0, 0.5, 1.0), abs=1e-3)
    assert set(report.series.values) == {"running", "waiting"}
    assert report.series.values["running"][2] == 2
    assert report.series.values["waiting"][2] == 1


def test_the_servers_prompt_count_replaces_the_plan() -> None:
    report, _ = run_scripted(lambda *_: Answer(cached_tokens=3), workload(Closed(users=1), 5))
    assert {row.prompt_tokens for row in report.requests} == {8}
    assert report.summary.cached_tokens == 15
