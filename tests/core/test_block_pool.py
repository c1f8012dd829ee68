from __future__ import annotations

import pytest

from engine.core.block_pool import BlockPool, BlockState
from engine.errors import ConfigError, EngineError


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    return pool.num_free, pool.num_private, pool.num_shared, pool.num_cached


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert [pool.allocate() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(EngineError, match="without a free block"):
        pool.allocate()


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ConfigError, match="at least 1 block"):
        BlockPool(1)


def test_a_block_goes_through_all_states_and_the_counts_follow() -> None:
    pool = BlockPool(6)
    block = pool.allocate()
    assert (pool.state(block), counts(pool)) == (BlockState.PRIVATE, (4, 1, 0, 0))
    pool.acquire(block)
    assert (pool.state(block), counts(pool)) == (BlockState.SHARED, (4, 0, 1, 0))
    pool.release(block)
    assert (pool.state(block), counts(pool)) == (BlockState.PRIVATE, (4, 1, 0, 0))
    pool.enter_tree(block)
    assert (pool.state(block), counts(pool)) == (BlockState.SHARED, (4, 0, 1, 0))
    pool.release(block)
    assert (pool.state(block), counts(pool)) == (BlockState.CACHED, (4, 0, 0, 1))
    pool.acquire(block)
    assert (pool.state(block), counts(pool)) == (BlockState.SHARED, (4, 0, 1, 0))
    pool.release(block)
    pool.leave_tree(block)
    assert (pool.state(block), counts(pool)) == (BlockState.FREE, (5, 0, 0, 0))


def test_the_oldest_cached_block_is_the_one_released_first_since_its_last_use() -> None:
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.enter_tree(block)
    for block in (2, 1, 3):
        pool.release(block)
    assert pool.cached_ids() == [2, 1, 3]
    pool.acquire(2)
    pool.release(2)
    assert pool.cached_ids() == [1, 3, 2]
    assert pool.oldest_cached() == 1


def test_a_held_block_is_not_handed_out_again_before_the_step_ends() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.hold(block)
    pool.release(block)
    assert pool.allocate() == 2
    assert pool.num_free == 0
    pool.end_step()
    assert pool.allocate() == block


@pytest.mark.parametrize("operation", ["release", "acquire", "enter_tree", "leave_tree"])
def test_operations_on_a_free_block_are_refused(operation: str) -> None:
    pool = BlockPool(3)
    with pytest.raises(EngineError):
        getattr(pool, operation)(1)
    assert counts(pool) == (2, 0, 0, 0)


def test_a_block_enters_the_tree_once() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.enter_tree(block)
    with pytest.raises(EngineError, match="shared"):
        pool.enter_tree(block)


def test_a_referenced_block_does_not_leave_the_tree() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.enter_tree(block)
    with pytest.raises(EngineError, match="shared"):
        pool.leave_tree(block)
