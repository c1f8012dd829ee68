"""Memory that is far too short, and clients that leave, on the native kernels: the same tokens, and nothing leaks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kernels.native._native", reason="the native kernels are not built")

from engine.core.plan import SeqId
from engine.core.queue_policies import queue_factories
from engine.core.request import Sequence, Status
from engine.models.loader import load_model, open_model
from engine.types import FinishReason, GenerationRequest, KVGroupStats
from kernels.interface import DType
from kernels.select import select
from tests.choices import Outcome, request
from tests.runner.harness import Harness
from tests.runner.tiny import tiny_decoder

Make = Callable[..., Harness]

POLICIES = ["fcfs", "sjf", "priority", "fair", "lpm"]
SHARED = list(range(7, 47))  # a prompt's begin that many have
NUM_BLOCKS = 26
HOST_BLOCKS = 120


DEFAULT = pytest.param(None, marks=pytest.mark.slow, id="default-model")


@pytest.fixture(
    scope="module", params=[pytest.param((None, None), id="full"), pytest.param((40, None), id="window"), DEFAULT]
)
def make(default_model_path: Path, request: pytest.FixtureRequest) -> Make:
    """A tiny model with these windows, or the default model. A decoder for each harness: what the kernels have recorded
    of it belongs to one set of buffers."""
    if request.param is not None:
        tiny = select("cpu", DType.FLOAT32, "native", num_threads=1)
        return lambda **options: Harness(tiny_decoder(tiny, request.param), tiny, **options)
    native = select("cpu", DType.BFLOAT16, "native", num_threads=2)

    def default_model(**options: Any) -> Harness:
        opened = open_model(default_model_path)
        return Harness(load_model(opened, native, max_model_len=8192, max_num_batched_tokens=512), native, **options)

    return default_model


def mixed_requests(rng: random.Random, count: int, first_id: int = 0, *, alike: float = 0.4) -> list[GenerationRequest]:
    """Short and long, greedy and sampled, with choices, stops, penalties, logprobs; that share of them begins alike."""
    requests = []
    for number in range(first_id, first_id + count):
        prompt = [*(SHARED if rng.random() < alike else []), *rng.choices(range(256), k=rng.choice([3, 20, 50, 90]))]
        sampling: dict[str, Any] = {"temperature": rng.choice([0.0, 1.0])}
        if rng.random() < 0.3:
            sampling |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
        if rng.random() < 0.3:
            sampling |= {"logprobs": 2}
        if rng.random() < 0.15:
            sampling |= {"prompt_logprobs": 1}
        one = request(
            number,
            prompt,
            rng.choice([2, 15, 40, 70]),
            n=rng.choice([1, 1, 2, 4]),
            seed=number,
            stop=tuple(rng.choices(range(256), k=2)),
            **sampling,
        )
        requests.append(replace(one, priority=rng.randrange(3), tenant=rng.randrange(3)))
    return requests


def idle_run(make: Make, requests: list[GenerationRequest]) -> dict[SeqId, Outcome]:
    """Each request alone, in memory without end."""
    harness = make(num_blocks=400, block_size=8, prefix_cache=False)
    for one in requests:
        harness.run(one)
    return harness.outcomes


def assert_nothing_is_held(harness: Harness) -> None:
    """No reference is left: each block is free or cached, on both sides."""
    harness.scheduler.check_invariants()
    stats = harness.scheduler.stats()
    sides = ((stats.kv_groups, NUM_BLOCKS), (stats.kv_host_groups, HOST_BLOCKS))
    for groups, total in sides:
        for group in groups:
            assert group == KVGroupStats(total - group.cached, 0, 0, group.cached)


@pytest.fixture(scope="module")
def workload(make: Make) -> tuple[list[GenerationRequest], dict[SeqId, Outcome]]:
    requests = mixed_requests(random.Random(3), 16)
    return requests, idle_run(make, requests)


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.token_ids == expected.token_ids
    assert outcome.logprobs == expected.logprobs
    assert outcome.prompt_logprobs == expected.prompt_logprobs
    assert outcome.finish_reason is expected.finish_reason


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("policy", POLICIES)
def test_four_times_as_much_demand_as_blocks(
    make: Make,
    workload: tuple[list[GenerationRequest], dict[SeqId, Outcome]],
    policy: str,
    preemption: Any,
) -> None:
    requests, expected = workload
    demand = sum(one.n * -(-(len(one.prompt_token_ids) + one.sampling.max_tokens) // 8) for one in requests)
    assert demand >= 4 * NUM_BLOCKS
    harness = make(
        num_blocks=NUM_BLOCKS,
        block_size=8,
        budget=40,
        max_num_seqs=12,
        host_blocks=HOST_BLOCKS if preemption == "swap" else 0,
        preemption=preemption,
        queue=queue_factories(50)[policy],
    )
    outcomes = harness.run(*requests)
    stats = harness.scheduler.stats()
    assert stats.preemptions_total > 0
    assert (stats.parked_total > 0) == (preemption == "swap")
    for seq_id, outcome in outcomes.items():
        assert_same(outcome, expected[seq_id])
    assert_nothing_is_held(harness)


def state_of(seq: Sequence, running: list[Sequence]) -> list[str]:
    """What an abort may meet."""
    if seq.status is Status.WAITING:
        return ["swapped out" if seq.parked else "queued"]
    states = ["mid-chunk" if seq.num_computed_tokens < seq.num_prompt_tokens else "decoding"]
    for other in running:
        if other is not seq and not set(blocks_of(other) - {0}).isdisjoint(blocks_of(seq)):
            is_sibling = other.seq_id.request_id == seq.seq_id.request_id
            states.append("forked" if is_sibling else "prefix-shared")
    return states


def blocks_of(seq: Sequence) -> set[int]:
    return set() if seq.tables is None else set(seq.tables.block_ids[0])


@pytest.mark.parametrize("seed", [1, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8)]])
def test_500_aborts_in_every_state(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    queue = queue_factories(60)[rng.choice(POLICIES)]
    harness = make(
        num_blocks=NUM_BLOCKS,
        block_size=8,
        budget=24,
        max_num_seqs=10,
        host_blocks=HOST_BLOCKS,
        preemption="swap",
        queue=queue,
    )
    met: Counter[str] = Counter()
    scheduler = harness.scheduler
    num_requests = num_aborts = 0
    while num_aborts < 500:
        while len(scheduler.roster.live) < 14:
            num_requests += 1
            harness.add(*mixed_requests(rng, 1, num_requests, alike=0.8))
        for _ in range(rng.choice([0, 1, 1, 2, 5])):
            harness.step()
        live = [seq for choices in scheduler.roster.live.values() for seq in choices.values()]
        if live:
            seq = rng.choice(live)
            met.update(set(state_of(seq, scheduler.roster.running)))
            choice = None if rng.random() < 0.5 else seq.seq_id.choice_index
            harness.outcomes.hear(scheduler.abort(seq.seq_id.request_id, choice))
            scheduler.check_invariants()
            num_aborts += 1
    assert sorted(met) == ["decoding", "forked", "mid-chunk", "prefix-shared", "queued", "swapped out"]
    harness.run()
    assert all(outcome.finish_reason is not None for outcome in harness.outcomes.values())
    assert_nothing_is_held(harness)
    harness.run(request(10_000, [1, 2], 1))  # what has ended is forgotten with the next step
    assert list(harness.runner._states) == [SeqId(10_000, 0)]
    survivors = [seq_id for seq_id, out in harness.outcomes.items() if out.finish_reason is not FinishReason.ABORT]
    assert len(survivors) > 20
