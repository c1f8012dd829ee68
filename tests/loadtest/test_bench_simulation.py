"""The simulation of batching, by hand and against the closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from engine.config import FakeOptions
from engine.core.plan import KVCapacity, KVGroupCapacity
from engine.core.scheduler import Scheduler
from engine.fake_executor import FakeExecutor
from engine.types import GenerationRequest, SamplingParams
from loadtest.scripted_server import Answer
from loadtest.simulate import Batching, Engine, Job, Outcome, StepCost, constant_cost, simulate
from loadtest.step_cost import full_batch_gaps
from loadtest.whatif import observed, read_cost, simulation_tables
from loadtest.workloads import Closed, RequestClass
from tests.loadtest.bench_kit import record, run_scripted, workload

_ONE = constant_cost(1.0)


def _engine(batching: Batching, seats: int = 2, budget: int = 100) -> Engine:
    return Engine(batching, seats, budget)


def test_step_costs_are_linear_between_the_measured_points() -> None:
    cost = StepCost(decode=((1, 1.0), (3, 2.0)), prefill=((10, 2.0), (20, 3.0)))
    assert cost.seconds(2, 0) == pytest.approx(1.5)
    assert cost.seconds(5, 0) == pytest.approx(3.0)
    assert cost.seconds(0, 15) == pytest.approx(2.5)
    assert cost.seconds(1, 15) == pytest.approx(1.0 + 2.5 - 1.0)  # the fixed second is paid once


def test_a_static_batch_waits_for_its_longest() -> None:
    """Two seats, one second a step; outputs 1, 4, 4. Static: the third waits until the second has ended, at 4 s."""
    jobs = [Job(0.0, 5, 1), Job(0.0, 5, 4), Job(0.0, 5, 4)]
    static = simulate(jobs, _ONE, _engine(Batching.STATIC))
    assert static.requests_per_second == pytest.approx(3 / 8)
    assert static.mean_latency == pytest.approx((1 + 4 + 8) / 3)
    continuous = simulate(jobs, _ONE, _engine(Batching.CONTINUOUS))
    assert continuous.requests_per_second == pytest.approx(3 / 5)
    assert continuous.mean_latency == pytest.approx((1 + 4 + 5) / 3)


def test_prompts_longer_than_the_budget_take_several_steps() -> None:
    """25 tokens at 10 a step: first token in the third; with a decode beside it, 9 a step are left."""
    alone = simulate([Job(0.0, 25, 1)], _ONE, _engine(Batching.CONTINUOUS, budget=10))
    assert alone.mean_ttft == pytest.approx(3.0)
    both = simulate([Job(0.0, 1, 9), Job(0.0, 27, 1)], _ONE, _engine(Batching.CONTINUOUS, budget=10))
    assert both.mean_ttft == pytest.approx((1 + 3) / 2)  # 9 beside the first prompt, then twice 9 beside its decode


def test_a_closed_loop_sends_the_next_when_one_ends() -> None:
    """Two users, two steps a request: each next request just misses the step that begins when the last one ends, so a
    pair of requests takes three steps."""
    jobs = [Job(0.0, 1, 2)] * 6
    outcome = simulate(jobs, _ONE, _engine(Batching.CONTINUOUS, seats=8), users=2)
    assert outcome.requests_per_second == pytest.approx(6 / 9)
    assert outcome.max_in_flight == 2


@pytest.mark.parametrize("seats", [4, 8])
def test_at_constant_cost_the_gain_is_that_of_the_closed_form(seats: int) -> None:
    """Outputs uniform on 1 … L, a full queue, prompts of one token: 2B/(B+1)."""
    rng = Random(1)
    jobs = [Job(0.0, 1, rng.randint(1, 200)) for _ in range(2000)]
    continuous, static = (
        simulate(jobs, _ONE, Engine(batching, seats, 1000)).requests_per_second for batching in Batching
    )
    assert continuous / static == pytest.approx(2 * seats / (seats + 1), rel=0.03)


def test_a_static_batch_begins_with_whoever_comes_first() -> None:
    """Three users on four seats: the first is alone in its batch, the other two share the next."""
    outcome = simulate([Job(0.0, 1, 5)] * 3, _ONE, _engine(Batching.STATIC, seats=4), users=3)
    assert outcome.mean_latency == pytest.approx((5 + 10 + 10) / 3)


def test_only_gaps_of_the_full_batch_measure_its_step() -> None:
    first, second = record(0.0, [1.0, 2.0, 4.0, 6.0, 7.0]), record(0.0, [2.0, 4.0, 6.0])
    assert full_batch_gaps([first, second]) == [2.0, 2.0, 2.0, 2.0]


def test_the_simulation_agrees_with_a_server_that_costs_the_same(tmp_path: Path) -> None:
    """A scripted server of four seats, 0.1 s a step whatever is in it: a continuous engine of constant cost."""
    what = workload(Closed(users=8), 64, RequestClass(name="r", prompt=1, output=10))
    report, _ = run_scripted(lambda *_: Answer(0.1, 0.1), what, max_running=4)
    cost_file = tmp_path / "cost.json"
    cost_file.write_bytes(msgspec.json.encode(constant_cost(0.1)))
    cost = read_cost(cost_file)
    jobs = [Job(row.scheduled_at, row.prompt_tokens, row.output_tokens) for row in report.requests]
    simulated = simulate(jobs, cost, Engine(Batching.CONTINUOUS, 4, 100), users=8)
    measured = observed(report, 4)
    assert measured.requests_per_second == pytest.approx(simulated.requests_per_second, rel=0.01)
    assert measured.mean_latency == pytest.approx(simulated.mean_latency, rel=0.02)
    assert measured.waste == pytest.approx(simulated.waste, abs=0.01)
    (table,) = simulation_tables(report, cost, 4, 100)
    assert [row[0] for row in table.rows][:2] == ["requests/s", "mean latency, s"]
    assert len(table.columns) == 1 + 3 + 3  # no measured columns: the server is neither `continuous` nor `static`


def _played(jobs: Sequence[Job], cost: StepCost, engine: Engine) -> Outcome:
    """The same jobs through the engine's own scheduler, a step at a time in virtual time."""
    kv = KVCapacity(16, (KVGroupCapacity(1 + 32 * len(jobs)),))
    scheduler = Scheduler(
        kv,
        max_num_batched_tokens=engine.token_budget,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=512,
        prefix_cache=False,
        batching=engine.batching.value,
    )
    executor = FakeExecutor(FakeOptions(), kv)
    order = sorted(range(len(jobs)), key=lambda number: jobs[number].arrival)
    first: dict[int, float] = {}
    ended: dict[int, float] = {}
    now, most = 0.0, 0
    while len(ended) < len(jobs):
        if not scheduler.has_work():
            now = max(now, jobs[order[0]].arrival)
        while order and jobs[order[0]].arrival <= now:
            number = order.pop(0)
            prompt, output = jobs[number].prompt_tokens, jobs[number].output_tokens
            scheduler.add(GenerationRequest(number, (1,) * prompt, SamplingParams(output, temperature=0.0), 0))
        most = max(most, len(jobs) - len(order) - len(ended))
        plan = scheduler.schedule()
        decodes = sum(seq.start_position >= jobs[seq.seq_id.request_id].prompt_tokens for seq in plan.seqs)
        now += cost.seconds(decodes, plan.num_scheduled_tokens - decodes)
        for update in scheduler.update(plan, executor.collect(executor.submit(plan))):
            first.setdefault(update.request_id, now)
            if update.finish_reason is not None:
                ended[update.request_id] = now
    latencies = [ended[number] - job.arrival for number, job in enumerate(jobs)]
    waits = [first[number] - job.arrival for number, job in enumerate(jobs)]
    duration = now - min(job.arrival for job in jobs)
    return Outcome(
        requests_per_second=len(jobs) / duration,
        mean_latency=sum(latencies) / len(jobs),
        p99_latency=float(np.percentile(latencies, 99)),
        mean_ttft=sum(waits) / len(jobs),
        waste=1 - sum(ended[number] - first[number] for number in first) / (engine.max_num_seqs * duration),
        max_in_flight=most,
    )


@pytest.mark.parametrize("batching", Batching)
@pytest.mark.parametrize("seed", range(4))
def test_the_simulation_is_the_engines_own_scheduling(batching: Batching, seed: int) -> None:
    """Every figure, at a load that piles up and at one that does not, with a cost that grows with the batch."""
    rng = Random(seed)
    engine = Engine(batching, max_num_seqs=rng.choice((1, 3, 8)), token_budget=rng.choice((16, 64, 256)))
    cost = StepCost(decode=((1, 0.010), (4, 0.016), (8, 0.020)), prefill=((16, 0.012), (256, 0.110)))
    times = accumulate(rng.expovariate(rng.choice((0.5, 5.0))) for _ in range(60))
    jobs = [Job(at, rng.randint(1, 300), rng.randint(1, 120)) for at in times]
    simulated, played = simulate(jobs, cost, engine), _played(jobs, cost, engine)
    for figure in fields(Outcome):
        assert getattr(simulated, figure.name) == pytest.approx(getattr(played, figure.name), rel=1e-9), figure.name
