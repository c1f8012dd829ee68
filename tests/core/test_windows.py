"""Sequences with KV groups that see only the last tokens."""

from __future__ import annotations

import pytest

from engine.core.plan import BlockTableTail, KVCapacity, KVGroupCapacity, SeqId
from engine.errors import RequestRejected
from tests.choices import request
from tests.core.driver import capacity, make_driver

MIXED = KVCapacity(16, (KVGroupCapacity(101), KVGroupCapacity(101, 32)))


def test_entries_that_left_the_window_become_the_null_block_in_the_next_plan() -> None:
    driver = make_driver(MIXED, budget=64)
    driver.add(request(1, 100, 5))
    tails = []
    for _ in range(3):
        tails.append(driver.submit().seqs[0].block_tables)
        driver.collect()
    assert tails == [
        (BlockTableTail(0, (1, 2, 3, 4)), BlockTableTail(0, (1, 2, 3, 4))),
        # token 64 sees 33 … 64: blocks 0 and 1 are gone
        (BlockTableTail(4, (5, 6, 7)), BlockTableTail(0, (0, 0, 3, 4, 5, 6, 7))),
        # token 100 sees 69 … 100: blocks 2 and 3 are gone
        (BlockTableTail(7, ()), BlockTableTail(2, (0, 0, 5, 6, 7))),
    ]


def test_a_window_pool_smaller_than_the_prompt_takes_it_in_smaller_chunks() -> None:
    driver = make_driver(capacity(6, window=64))
    driver.add(request(1, 200, 2))
    # 64 tokens that are seen take four of the six blocks at a boundary
    assert driver.run() == [[(1, 96)], [(1, 32)], [(1, 32)], [(1, 32)], [(1, 8)], [(1, 1)]]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_smallest_window_pool_that_is_accepted_serves_any_length(depth: int) -> None:
    for num_blocks in range(1, 8):
        driver = make_driver(capacity(num_blocks, window=64), depth=depth)
        if num_blocks < 5:
            with pytest.raises(RequestRejected, match="need 5 blocks of 16 tokens"):
                driver.add(request(1, 200, 100))
        else:
            driver.add(request(1, 200, 100))
            driver.run()
            assert len(driver.outcomes[SeqId(1, 0)].token_ids) == 100


def test_memory_in_use_stays_bounded_while_a_text_of_4096_tokens_grows() -> None:
    kv = KVCapacity(16, (KVGroupCapacity(300), KVGroupCapacity(40, 512)))
    driver = make_driver(kv, budget=512)
    scheduler, executor = driver.scheduler, driver.executor
    scheduler.add(request(1, 16, 4080))
    most = 0
    while scheduler.has_work():  # not driver.step(): that checks all the books
        output = scheduler.schedule()
        scheduler.update(output, executor.run(output))
        stats = scheduler.stats().kv_groups[1]
        most = max(most, stats.private + stats.shared)
    assert most == 512 // 16 + 1
    scheduler.check_invariants()


def test_a_hit_takes_the_window_alone_in_window_groups() -> None:
    driver = make_driver(MIXED)
    driver.add(request(1, range(100), 1))
    driver.run()
    driver.add(request(2, range(100), 1))
    [seq] = driver.submit().seqs
    assert (seq.start_position, len(seq.token_ids)) == (96, 4)
    assert seq.block_tables == (
        BlockTableTail(0, (1, 2, 3, 4, 5, 6, 7)),
        BlockTableTail(0, (0, 0, 0, 0, 5, 6, 7)),
    )


def test_a_hit_shrinks_to_where_the_window_is_still_there() -> None:
    driver = make_driver(KVCapacity(16, (KVGroupCapacity(101), KVGroupCapacity(8, 32))))
    driver.add(request(1, range(96), 1))
    driver.run()
    driver.add(request(2, 70, 1))  # takes window blocks from the first: the oldest go first
    driver.run()
    driver.add(request(3, range(96), 1))
    [seq] = driver.submit().seqs
    assert seq.start_position % 16 == 0
    assert seq.start_position < 80
    driver.collect()
    assert driver.outcomes[SeqId(3, 0)].num_cached_tokens == seq.start_position


def test_choices_copy_in_every_group() -> None:
    driver = make_driver(MIXED)
    driver.add(request(1, 40, 30, n=3))
    driver.run()
    assert driver.executor.num_copies == 4
