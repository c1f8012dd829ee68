"""The example of docs/engine-core.md, as it is told there."""

from __future__ import annotations

from engine.core.plan import BlockCopy
from tests.choices import request
from tests.core.driver import Driver, capacity, make_driver


def tables(driver: Driver) -> dict[tuple[int, int], list[int]]:
    running = driver.scheduler.roster.running
    return {(*seq.seq_id,): driver.scheduler.roster.tables_of(seq).block_ids[0] for seq in running}


def test_the_worked_example() -> None:
    driver = make_driver(capacity(8, block_size=4), budget=12, max_num_seqs=4)
    pool = driver.scheduler.kv.pools[0]
    driver.add(request(1, range(10), 3), request(2, [*range(8), 50, 51], 3))

    assert driver.step() == [(1, 10)]
    assert tables(driver) == {(1, 0): [1, 2, 3]}
    assert pool.num_free == 5

    assert driver.step() == [(1, 1), (2, 2)]
    assert tables(driver) == {(1, 0): [1, 2, 3], (2, 0): [1, 2, 4]}
    assert pool.num_free == 4

    driver.add(request(3, 6, 3, n=2))
    assert driver.step() == [(1, 1), (2, 1)]
    assert tables(driver) == {(2, 0): [1, 2, 4]}
    assert (pool.cached_ids(), pool.num_free) == ([3], 4)

    assert driver.step() == [(2, 1), (3, 5)]
    assert tables(driver) == {(3, 0): [5, 6]}
    assert (pool.cached_ids(), pool.num_free) == ([3, 4, 2, 1], 2)

    output = driver.submit()
    driver.collect()
    assert driver.plans[-1] == [(3, 1), (3, 1)]
    assert output.block_copies == (BlockCopy(0, 6, 7),)
    assert tables(driver) == {(3, 0): [5, 7], (3, 1): [5, 6]}
    assert pool.num_free == 1

    assert [driver.step(), driver.step()] == [[(3, 1), (3, 1)]] * 2
    assert (pool.cached_ids(), pool.num_free) == ([3, 4, 2, 1, 7, 6, 5], 1)

    driver.add(request(4, 21, 1))
    assert driver.step() == [(4, 12)]
    assert tables(driver) == {(4, 0): [8, 3, 4]}
    assert pool.cached_ids() == [2, 1, 7, 6, 5]

    assert driver.step() == [(4, 9)]
    assert (pool.cached_ids(), pool.num_free) == ([6, 5, 1, 2, 4, 3, 8], 1)
    assert driver.scheduler.stats().evicted_blocks_total == 5
    assert not driver.scheduler.has_work()
