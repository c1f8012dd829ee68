"""The checks find what they are there for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.core.invariants import InvariantViolation
from engine.core.radix_cache import RadixCache
from engine.core.request import Status
from tests.choices import request
from tests.core.driver import Driver, capacity, make_driver


@pytest.fixture
def driver() -> Driver:
    """One sequence decodes, one waits, one has ended and left two blocks in the tree."""
    driver = make_driver(capacity(20), max_num_seqs=1)
    driver.add(request(1, range(40), 1), request(2, 40, 9), request(3, 40, 9))
    driver.step()
    driver.step()
    return driver


def lose_a_reference(driver: Driver) -> None:
    driver.scheduler.kv.pools[0].ref_counts[5] = 0


def leak_a_block(driver: Driver) -> None:
    driver.scheduler.kv.pools[0].allocate()


def free_a_block_in_use(driver: Driver) -> None:
    driver.scheduler.kv.pools[0]._free.append(driver.scheduler.roster.running[0].tables.block_ids[0][2])  # type: ignore[union-attr]


def miscount(driver: Driver) -> None:
    driver.scheduler.kv.pools[0].num_private += 1


def name_a_block_twice(driver: Driver) -> None:
    tables = driver.scheduler.roster.running[0].tables
    assert tables is not None
    driver.scheduler.kv.pools[0].acquire(tables.block_ids[0][0])
    tables.block_ids[0].append(tables.block_ids[0][0])


def evict_a_prefix_before_what_is_below_it(driver: Driver) -> None:
    cached = driver.scheduler.kv.pools[0]._cached
    cached.move_to_end(next(iter(cached)))


def change_the_tokens_of_an_edge(driver: Driver) -> None:
    cache = driver.scheduler.kv.cache
    assert isinstance(cache, RadixCache)
    next(cache.nodes()).tokens[0] = 999


def lose_a_waiting_sequence(driver: Driver) -> None:
    driver.scheduler.roster.queue.pop(0)


def forget_a_step(driver: Driver) -> None:
    driver.scheduler.roster.running[0].num_in_flight = 1


def mix_up_the_status(driver: Driver) -> None:
    driver.scheduler.roster.running[0].status = Status.LEAVING


def compute_beyond_the_table(driver: Driver) -> None:
    driver.scheduler.roster.running[0].num_computed_tokens = 49


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_reference, "has ref_counts"),
        (leak_a_block, "has ref_counts"),
        (free_a_block_in_use, "the free list of group 0"),
        (miscount, "group 0 counts 2 private blocks"),
        (name_a_block_twice, "has a block twice"),
        (evict_a_prefix_before_what_is_below_it, "would be evicted before"),
        (change_the_tokens_of_an_edge, "finds the child of"),
        (lose_a_waiting_sequence, "live are"),
        (forget_a_step, "miscounts its steps under way"),
        (mix_up_the_status, "is leaving, not running"),
        (compute_beyond_the_table, "has 3 blocks for 49 tokens"),
    ],
)
def test_damage_is_found_and_named(driver: Driver, damage: Callable[[Driver], None], message: str) -> None:
    driver.scheduler.check_invariants()
    damage(driver)
    with pytest.raises(InvariantViolation, match=message):
        driver.scheduler.check_invariants()


def test_an_idle_scheduler_that_has_lost_a_block_is_found_out() -> None:
    driver = make_driver(capacity(20))
    driver.add(request(1, 40, 1))
    driver.run()
    pool = driver.scheduler.kv.pools[0]
    pool.enter_tree(pool.allocate())
    with pytest.raises(InvariantViolation):
        driver.scheduler.check_invariants()
