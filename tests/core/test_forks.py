"""n choices of one request: one prompt, shared blocks, each its own noise."""

from __future__ import annotations

import pytest

from engine.core.plan import BlockCopy, BlockTableTail, SchedulerOutput, SeqId
from engine.types import FinishReason, KVGroupStats
from tests.choices import request
from tests.core.driver import Driver, capacity, make_driver


def shares(output: SchedulerOutput) -> list[tuple[int, int, int]]:
    """(choice, start, tokens) of all sequences."""
    return [(s.seq_id.choice_index, s.start_position, len(s.token_ids)) for s in output.seqs]


def assert_solo_outputs(driver: Driver, request_id: int, *requests_choices: int) -> None:
    """Each choice has what it would have had as a request of its own."""
    for choice_index in requests_choices:
        alone = make_driver(capacity(100))
        alone.add(request(request_id, 20, 5, choice_index=choice_index))
        alone.run()
        seq_id = SeqId(request_id, choice_index)
        assert driver.outcomes[seq_id].token_ids == alone.outcomes[seq_id].token_ids


@pytest.mark.parametrize("n", [2, 3, 8])
def test_choices_part_before_the_last_prompt_token_and_copy_in_the_same_step(n: int) -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 20, 5, n=n))
    first = driver.submit()
    driver.collect()
    assert shares(first) == [(0, 0, 19)]
    assert not first.seqs[0].sample
    second = driver.submit()
    driver.collect()
    assert shares(second) == [(k, 19, 1) for k in range(n)]
    # Block 1 is shared by all, block 2 holds tokens 16, 17, 18: all copy it but the last, who writes in place.
    assert second.block_copies == tuple([BlockCopy(0, 2, 3 + k) for k in range(n - 1)])
    assert [s.block_tables for s in second.seqs[1:]] == [
        (BlockTableTail(0, (1, 3 + k if k < n - 1 else 2)),) for k in range(1, n)
    ]
    assert driver.scheduler.stats().kv_groups == (KVGroupStats(free=100 - 1 - n, private=n, shared=1, cached=0),)
    driver.run()
    assert_solo_outputs(driver, 1, *range(n))
    assert len({tuple(outcome.token_ids) for outcome in driver.outcomes.values()}) == n


def test_a_prompt_that_ends_behind_a_block_is_shared_without_copies() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 33, 5, n=3))
    driver.submit()
    driver.collect()
    output = driver.submit()
    assert output.block_copies == ()
    assert shares(output) == [(0, 32, 1), (1, 32, 1), (2, 32, 1)]
    assert driver.scheduler.stats().kv_groups == (KVGroupStats(free=95, private=3, shared=2, cached=0),)


def test_a_prompt_of_one_token_parts_at_once() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 1, 2, n=3), request(2, 5, 1))
    output = driver.submit()
    assert shares(output)[:3] == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    assert all(seq.sample for seq in output.seqs)


def test_a_prompt_that_is_cached_but_for_its_last_token_parts_at_once() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(33), 1))
    driver.run()
    driver.add(request(2, range(33), 1, n=2))
    assert shares(driver.submit()) == [(0, 32, 1), (1, 32, 1)]
    assert driver.outcomes[SeqId(2, 1)].num_cached_tokens == 0
    driver.collect()
    assert [driver.outcomes[SeqId(2, k)].num_cached_tokens for k in (0, 1)] == [32, 32]


def test_choices_beyond_the_slots_go_to_the_head_of_the_queue() -> None:
    driver = make_driver(capacity(100), max_num_seqs=2)
    driver.add(request(1, 20, 5, n=4), request(2, 20, 1), request(3, 20, 1))
    assert driver.step() == [(1, 19), (2, 20)]
    assert driver.step() == [(1, 1), (1, 1)]
    waiting = [seq.seq_id for seq in driver.scheduler.roster.queue]
    assert waiting == [SeqId(1, 2), SeqId(1, 3), SeqId(3, 0)]
    plans = driver.run()
    assert plans[:5] == [[(1, 1), (1, 1)]] * 4 + [[(1, 4), (1, 4)]]  # 16 of their 20 tokens are cached
    assert_solo_outputs(driver, 1, *range(4))


def test_choices_go_before_a_prompt_that_was_admitted_after_their_request() -> None:
    driver = make_driver(capacity(100), budget=30)
    driver.add(request(1, 20, 5, n=3), request(2, 100, 1))
    assert [driver.step() for _ in range(3)] == [
        [(1, 19), (2, 11)],
        [(1, 1), (1, 1), (1, 1), (2, 27)],
        [(1, 1), (1, 1), (1, 1), (2, 27)],
    ]


def test_an_abort_before_they_part_ends_every_choice() -> None:
    driver = make_driver(capacity(100), budget=16)
    driver.add(request(1, 40, 5, n=3))
    driver.step()
    updates = driver.abort(1)
    assert [(u.choice_index, u.finish_reason) for u in updates] == [(k, FinishReason.ABORT) for k in range(3)]
    assert not driver.scheduler.has_work()


@pytest.mark.parametrize("aborted", [0, 1, 2])
@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize("depth", [1, 2])
def test_the_abort_of_one_choice_leaves_the_others_as_they_are(aborted: int, num_steps: int, depth: int) -> None:
    driver = make_driver(capacity(100), budget=16, depth=depth)
    driver.add(request(1, 20, 5, n=3))
    for _ in range(num_steps):
        driver.step()
    [update] = driver.abort(1, aborted)
    assert (update.choice_index, update.finish_reason) == (aborted, FinishReason.ABORT)
    driver.run()
    assert_solo_outputs(driver, 1, *[k for k in range(3) if k != aborted])
    assert driver.scheduler.stats().kv_groups[0].free + driver.scheduler.stats().kv_groups[0].cached == 100


def test_a_choice_without_a_block_for_its_copy_waits_and_spares_the_next_one_the_copy() -> None:
    driver = make_driver(capacity(4))
    driver.add(request(1, 20, 5, n=4))
    driver.step()
    output = driver.submit()
    driver.collect()
    # 0 and 1 take the last two blocks; 2 makes 3 give up its place, and then is the last who refers to block 2.
    assert shares(output) == [(0, 19, 1), (1, 19, 1), (2, 19, 1)]
    assert output.block_copies == (BlockCopy(0, 2, 3), BlockCopy(0, 2, 4))
    assert [seq.seq_id for seq in driver.scheduler.roster.queue] == [SeqId(1, 3)]
    driver.run()
    assert_solo_outputs(driver, 1, *range(4))
