"""Many random operations in a world where everything is scarce: two tokens, few blocks, few slots."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from engine.core.plan import KVCapacity, KVGroupCapacity, SeqId
from engine.core.queue_policies import queue_factories
from engine.errors import RequestRejected
from engine.types import FinishReason, GenerationRequest, Pooling
from tests.choices import request
from tests.core.driver import Driver, expected_outputs, make_driver

VOCAB_SIZE = 2
POLICIES = ["fcfs", "fcfs", "sjf", "priority", "priority", "fair", "lpm"]
NUM_OPERATIONS = 2_500  # a world; 20 worlds


def random_world(rng: random.Random) -> tuple[KVCapacity, dict[str, Any]]:
    block_size = rng.choice([1, 2, 3, 4])
    windows: list[int | None] = rng.choice([[None], [None], [None, 5], [3], [None, None], [7, None, 2]])
    longest = 24 // block_size + 1  # blocks; what needs more is refused
    host_blocks = rng.choice([0, 3, longest, 4 * longest])
    copy_cost = rng.choice([0, 200, 600, 5000])
    groups = tuple(
        KVGroupCapacity(rng.randint(longest, 3 * longest), window, host_blocks, copy_cost) for window in windows
    )
    options = {
        "budget": rng.choice([1, 3, 8, 20]),
        "max_num_seqs": rng.choice([1, 3, 6, 9]),
        "max_model_len": rng.choice([20, 40]),
        "depth": rng.choice([1, 2, 2, 3]),
        "prefix_cache": rng.random() < 0.8,
        "preemption": rng.choice(["auto", "swap", "swap", "recompute"]),
        "batching": rng.choice(["continuous", "continuous", "continuous", "static"]),
        "max_prefix_wait_steps": rng.choice([0, 2, 64]),
        "queue": (rng.choice(POLICIES), rng.choice([1, 5, 2000])),
    }
    return KVCapacity(block_size, groups), options


def random_prompt(rng: random.Random) -> list[int]:
    """Often the beginning of one of two long texts, so that prefixes are shared."""
    length = rng.choice([1, 2, 3, 5, 8, 9, 12, 16, 21])
    text = rng.choice([[0] * 21, [1, 1, 0, 1, 0, 0, 0] * 3, None])
    if text is None:
        return [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    return text[:length] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 0, 1, 2]))]


def random_request(rng: random.Random, request_id: int) -> GenerationRequest:
    kind = rng.random()
    embeds = kind < 0.06
    return request(
        request_id,
        random_prompt(rng),
        0 if embeds or kind > 0.95 else rng.choice([1, 2, 4, 9, 16]),
        n=rng.choice([1, 1, 1, 2, 3, 8]),
        seed=rng.randrange(3),
        stop=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.2 else (),
        min_tokens=rng.choice([0, 0, 3]),
        namespace=rng.choice([0, 0, 0, 1]),
        tenant=rng.randrange(3),
        priority=rng.choice([-1, 0, 0, 1]),
        prompt_logprobs=0 if rng.random() < 0.1 and not embeds else None,
        logprobs=0 if rng.random() < 0.1 and not embeds else None,
        pooling=rng.choice([Pooling.MEAN, Pooling.LAST]) if embeds else None,
    )


class World:
    """One scheduler under random operations; remembers them for the report of a failure."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        kv, options = random_world(self.rng)
        self.max_model_len: int = options["max_model_len"]
        self.log: list[str] = [f"{kv} {options}"]
        policy, max_wait_steps = options.pop("queue")
        queue = queue_factories(max_wait_steps)[policy]
        self.driver: Driver = make_driver(kv, vocab_size=VOCAB_SIZE, queue=queue, **options)
        self.requests: dict[int, GenerationRequest] = {}
        self.aborted: set[SeqId] = set()
        self.failing: set[int] = set()  # requests of which a choice was made to fail
        self.next_id = 0

    def operate(self) -> bool:
        """One random operation; False if there was nothing to do it to."""
        weights = {
            "add": 3,
            "submit": 12,
            "collect": 12,
            "abort": 0.3,
            "abort_choice": 0.5,
            "fail": 0.2,
            "reset": 0.1,
        }
        [name] = self.rng.choices(list(weights), list(weights.values()))
        self.log.append(name)
        happened: bool = getattr(self, name)()
        if not happened:
            self.log.pop()
        return happened

    def add(self) -> bool:
        if len(self.driver.scheduler.roster.queue) > 12:
            return False
        self.next_id += 1
        one = random_request(self.rng, self.next_id)
        self.log[-1] += f" {one}"
        try:
            self.driver.add(one)
        except RequestRejected:
            return False
        self.requests[one.request_id] = one
        return True

    def submit(self) -> bool:
        if len(self.driver.under_way) >= self.driver.depth or not self.driver.scheduler.has_work():
            return False
        output = self.driver.submit()
        self.log[-1] += f" {[(*seq.seq_id, seq.start_position, len(seq.token_ids)) for seq in output.seqs]}"
        return True

    def collect(self) -> bool:
        if not self.driver.under_way:
            return False
        self.driver.collect()
        return True

    def abort(self) -> bool:
        live = list(self.driver.scheduler.roster.live)
        return bool(live) and self._abort(self.rng.choice(live), None)

    def abort_choice(self) -> bool:
        live = list(self.driver.scheduler.roster.live)
        if not live:
            return False
        request_id = self.rng.choice(live)
        return self._abort(request_id, self.rng.randrange(self.requests[request_id].n))

    def _abort(self, request_id: int, choice_index: int | None) -> bool:
        self.log[-1] += f" {request_id} {choice_index}"
        updates = self.driver.abort(request_id, choice_index)
        assert choice_index is None or len(updates) <= 1
        self.aborted.update(SeqId(u.request_id, u.choice_index) for u in updates)
        return bool(updates)

    def fail(self) -> bool:
        if not self.driver.executor.states:
            return False
        seq_id = self.rng.choice(list(self.driver.executor.states))
        self.log[-1] += f" {seq_id}"
        self.driver.executor.failing[seq_id] = "scripted"
        self.failing.add(seq_id.request_id)
        return True

    def reset(self) -> bool:
        self.driver.scheduler.reset_prefix_cache()
        self.driver.scheduler.check_invariants()
        return True

    def finish(self) -> None:
        self.driver.executor.failing.clear()
        self.driver.run()
        for (request_id, choice_index), outcome in self.driver.outcomes.items():
            if request_id not in self.requests:
                continue
            one = self.requests[request_id]
            wanted, reason = expected_outputs(one, choice_index, self.max_model_len, VOCAB_SIZE)
            assert outcome.finish_reason is not None, "a choice without an end"
            is_aborted = SeqId(request_id, choice_index) in self.aborted
            assert is_aborted == (outcome.finish_reason is FinishReason.ABORT)
            assert outcome.finish_reason is not FinishReason.ERROR or request_id in self.failing
            if outcome.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert tuple(outcome.token_ids) == wanted[: len(outcome.token_ids)]
                continue
            assert (tuple(outcome.token_ids), outcome.finish_reason) == (wanted, reason)
            if one.sampling.prompt_logprobs is not None:
                told = [None if p is None else p.token_id for p in outcome.prompt_logprobs]
                assert told == [None, *one.prompt_token_ids[1:]]
            assert bool(outcome.embedding) == (one.pooling is not None)


@pytest.mark.parametrize("seed", range(20))
def test_all_books_stay_right_and_everybody_gets_the_tokens_of_a_solo_run(seed: int) -> None:
    world = World(seed)
    try:
        num_done = 0
        while num_done < NUM_OPERATIONS:
            num_done += world.operate()
        world.finish()
    except BaseException:
        sys.stdout.write("\n".join([f"seed {seed}", *world.log]))
        raise
