from __future__ import annotations

import pytest

from engine.core.block_tables import BlockTables
from engine.core.invariants import check_kv
from engine.core.kv_manager import KVManager
from engine.core.plan import BlockCopy, BlockTableTail, KVCapacity, KVGroupCapacity


def manager(
    num_blocks: int, block_size: int = 16, windows: tuple[int | None, ...] = (None,), max_step_tokens: int = 512
) -> KVManager:
    groups = tuple([KVGroupCapacity(num_blocks + 1, window) for window in windows])
    return KVManager(KVCapacity(block_size, groups), prefix_cache=True, max_step_tokens=max_step_tokens)


def admit(kv: KVManager, token_ids: list[int] | None = None) -> BlockTables:
    tokens = token_ids or []
    return kv.admit(0, kv.match(0, tokens, max(0, len(tokens) - 1)))


def run(kv: KVManager, tables: BlockTables, token_ids: list[int], start: int = 0) -> None:
    """Compute the tokens from start on in one step."""
    assert kv.grow(tables, start, len(token_ids) - start) == len(token_ids) - start
    kv.take_copies()
    kv.commit(tables, token_ids, len(token_ids))


# --- blocks ----------------------------------------------------------------------------------------------------------


def test_1000_tokens_take_63_blocks_of_16_and_the_last_holds_8() -> None:
    kv = manager(100)
    tables = admit(kv)
    assert kv.grow(tables, 0, 1000) == 1000
    assert tables.num_blocks == 63
    assert 1000 - 62 * 16 == 8
    assert kv.pools[0].num_free == 37


def test_the_next_block_is_allocated_for_token_1009() -> None:
    kv = manager(100)
    tables = admit(kv)
    kv.grow(tables, 0, 1000)
    for position in range(1000, 1008):  # tokens 1,001 … 1,008
        assert kv.grow(tables, position, 1) == 1
        assert tables.num_blocks == 63
    assert kv.grow(tables, 1008, 1) == 1
    assert tables.num_blocks == 64


@pytest.mark.parametrize(("block_size", "efficiency"), [(400, 0.5625), (64, 0.8789), (16, 0.9698)])
def test_memory_efficiency_of_eight_requests_of_50_to_400_tokens(block_size: int, efficiency: float) -> None:
    """Blocks of 400 tokens are what reserving the maximum for each request comes to."""
    kv = manager(200, block_size)
    lengths = range(50, 401, 50)
    for length in lengths:
        kv.grow(admit(kv), 0, length)
    assert sum(lengths) / (kv.pools[0].num_private * block_size) == pytest.approx(efficiency, abs=5e-5)


def test_a_system_prompt_of_2560_tokens_is_stored_once() -> None:
    kv = manager(400)
    system = list(range(2560))
    for question in range(5):
        tokens = [*system, 5000 + question]
        tables = admit(kv, tokens)
        run(kv, tables, tokens, start=0 if question == 0 else 2560)
    assert (kv.pools[0].num_shared, kv.pools[0].num_private) == (160, 5)


def test_what_does_not_fit_shrinks_to_what_does() -> None:
    kv = manager(3)
    tables = admit(kv)
    assert kv.grow(tables, 0, 100) == 48
    assert kv.grow(tables, 48, 1) == 0
    assert tables.num_blocks == 3


def test_growing_evicts_what_nobody_refers_to() -> None:
    kv = manager(4)
    old = admit(kv)
    run(kv, old, list(range(64)))
    kv.release(old, list(range(64)))
    assert kv.pools[0].num_cached == 4
    tables = admit(kv)
    assert kv.grow(tables, 0, 40) == 40
    assert (kv.pools[0].num_cached, kv.pools[0].num_private) == (1, 3)
    assert kv.cache.num_evicted_blocks == 3


def test_a_match_takes_its_references_before_anything_may_evict_it() -> None:
    kv = manager(4)
    old = admit(kv)
    run(kv, old, list(range(48)))
    kv.release(old, list(range(48)))
    tables = admit(kv, [*range(32), 99])
    assert tables.block_ids == [[1, 2]]
    other = admit(kv)
    assert kv.grow(other, 0, 64) == 32  # the free block and the cached one, not the two in use
    check_kv(kv, [tables, other])


def test_a_hit_leaves_a_token_to_run() -> None:
    kv = manager(4)
    text = list(range(32))
    tables = admit(kv)
    run(kv, tables, text)
    assert kv.match(0, text, len(text) - 1).num_blocks == 1


def test_reset_forgets_all_but_what_is_in_use() -> None:
    kv = manager(8)
    text = list(range(48))
    old = admit(kv)
    run(kv, old, text)
    kv.release(old, text)
    admit(kv, [*range(16), 99])
    kv.reset_prefix_cache()
    assert kv.match(0, text, 47).num_blocks == 1
    assert kv.pools[0].num_cached == 0


# --- tails -----------------------------------------------------------------------------------------------------------


def test_tails_tell_only_what_changed() -> None:
    kv = manager(10)
    tables = admit(kv)
    kv.grow(tables, 0, 20)
    assert kv.take_tails(tables) == (BlockTableTail(0, (1, 2)),)
    kv.grow(tables, 20, 12)
    assert kv.take_tails(tables) == (BlockTableTail(2, ()),)
    kv.grow(tables, 32, 1)
    assert kv.take_tails(tables) == (BlockTableTail(2, (3,)),)
    assert kv.take_tails(tables) == (BlockTableTail(3, ()),)


# --- copy-on-write ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 8])
def test_n_references_make_n_minus_1_copies_in_one_step(n: int) -> None:
    kv = manager(20)
    parent = admit(kv)
    run(kv, parent, list(range(20)))
    family = [parent, *[kv.fork(parent) for _ in range(n - 1)]]
    assert kv.pools[0].ref_counts[1:3] == [n, n]
    for tables in family:
        assert kv.grow(tables, 20, 1) == 1
    copies = kv.take_copies()
    assert copies == tuple([BlockCopy(0, 2, 3 + k) for k in range(n - 1)])
    assert [tables.block_ids[0] for tables in family] == [*[[1, 3 + k] for k in range(n - 1)], [1, 2]]
    assert kv.pools[0].ref_counts[1:3] == [n, 1]
    check_kv(kv, family)


def test_the_last_writer_writes_in_place_whenever_it_comes() -> None:
    kv = manager(20)
    parent = admit(kv)
    run(kv, parent, list(range(20)))
    child = kv.fork(parent)
    kv.grow(child, 20, 1)
    assert kv.take_copies() == (BlockCopy(0, 2, 3),)
    kv.grow(parent, 20, 1)
    assert kv.take_copies() == ()
    assert (parent.block_ids, child.block_ids) == ([[1, 2]], [[1, 3]])


def test_a_copy_shows_in_the_tail() -> None:
    kv = manager(20)
    parent = admit(kv)
    run(kv, parent, list(range(20)))
    kv.take_tails(parent)
    child = kv.fork(parent)
    kv.grow(parent, 20, 1)
    assert kv.take_tails(parent) == (BlockTableTail(1, (3,)),)
    kv.grow(child, 20, 1)
    assert kv.take_tails(child) == (BlockTableTail(0, (1, 2)),)


def test_full_blocks_are_never_copied() -> None:
    kv = manager(20)
    parent = admit(kv)
    run(kv, parent, list(range(32)))
    child = kv.fork(parent)
    kv.grow(parent, 32, 1)
    kv.grow(child, 32, 1)
    assert kv.take_copies() == ()
    assert (parent.block_ids, child.block_ids) == ([[1, 2, 3]], [[1, 2, 4]])


def test_every_group_copies_its_own_block() -> None:
    kv = manager(20, windows=(None, 40))
    parent = admit(kv)
    run(kv, parent, list(range(20)))
    child = kv.fork(parent)
    kv.grow(child, 20, 1)
    assert kv.take_copies() == (BlockCopy(0, 2, 3), BlockCopy(1, 2, 3))
    check_kv(kv, [parent, child])


def test_without_a_block_for_the_copy_nothing_changes() -> None:
    kv = manager(2)
    parent = admit(kv)
    run(kv, parent, list(range(20)))
    child = kv.fork(parent)
    assert kv.grow(child, 20, 1) == 0
    assert kv.take_copies() == ()
    assert kv.pools[0].ref_counts[1:3] == [2, 2]


def test_the_source_of_a_copy_does_not_become_the_target_of_another_in_the_same_step() -> None:
    kv = manager(6)
    one, two = admit(kv), admit(kv)
    run(kv, one, list(range(8)))
    run(kv, two, list(range(100, 108)))
    one_child, two_child = kv.fork(one), kv.fork(two)
    kv.grow(one, 8, 1)
    kv.release(one_child, list(range(8)))  # block 1, the source, is free
    kv.grow(two, 8, 1)
    copies = kv.take_copies()
    assert copies == (BlockCopy(0, 1, 3), BlockCopy(0, 2, 4))
    assert 1 in kv.pools[0].free_ids()
    check_kv(kv, [one, two, two_child])


# --- windows ---------------------------------------------------------------------------------------------------------


def test_blocks_that_leave_the_window_become_the_null_block_and_are_freed() -> None:
    kv = manager(20, windows=(None, 20))
    tables = admit(kv)
    text = list(range(100, 140))
    run(kv, tables, text)
    # The next token, 40, sees 21 … 40: block 0 holds 0 … 15.
    assert tables.block_ids == [[1, 2, 3], [0, 2, 3]]
    assert kv.pools[1].num_cached == 1
    assert kv.take_tails(tables) == (BlockTableTail(0, (1, 2, 3)), BlockTableTail(0, (0, 2, 3)))
    for token in range(140, 151):
        run(kv, tables, [*range(100, token + 1)], start=token - 100)
    assert tables.block_ids == [[1, 2, 3, 4], [0, 0, 3, 4]]  # token 51 sees 32 … 51
    assert kv.take_tails(tables) == (BlockTableTail(3, (4,)), BlockTableTail(1, (0, 3, 4)))


def test_a_window_bounds_the_blocks_in_use_however_long_the_text() -> None:
    kv = manager(6, windows=(64,))
    tables = admit(kv)
    text: list[int] = []
    for position in range(2_000):
        text.append(position)
        run(kv, tables, text, start=position)
        pool = kv.pools[0]
        assert pool.num_private + pool.num_shared <= 5  # 64 tokens touch 5 blocks at most


def test_a_hit_in_a_window_group_takes_only_what_the_next_token_sees() -> None:
    kv = manager(20, windows=(None, 20))
    tables = admit(kv)
    text = list(range(64))
    run(kv, tables, text)
    kv.release(tables, text)
    again = admit(kv, [*text, 64])
    assert again.block_ids == [[1, 2, 3, 4], [0, 0, 3, 4]]  # token 64 sees 45 … 64
    assert again.first_live == [0, 2]


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_a_full_group_must_hold_the_whole_sequence() -> None:
    kv = manager(4)
    assert kv.why_never_fits(64) is None
    assert kv.why_never_fits(65) == "65 tokens need 5 blocks of 16 tokens in KV group 0, which has 4"


def test_a_window_group_must_hold_the_window_alone() -> None:
    kv = KVManager(
        KVCapacity(16, (KVGroupCapacity(101), KVGroupCapacity(6, 64))), prefix_cache=True, max_step_tokens=64
    )
    assert kv.why_never_fits(1600) is None
    assert manager(4, windows=(64,)).why_never_fits(1600) == (
        "1600 tokens need 5 blocks of 16 tokens in KV group 0, which has 4"
    )


def test_admission_counts_what_a_hit_takes_out_of_the_cached_blocks() -> None:
    kv = manager(4)
    text = list(range(64))
    tables = admit(kv)
    run(kv, tables, text)
    kv.release(tables, text)
    match = kv.match(0, text, 63)
    assert match.num_blocks == 3
    assert kv.fits(match, 64, [0])
    assert not kv.fits(match, 64, [1])
    assert not kv.fits(match, 65, [0])


def test_states_add_up() -> None:
    kv = manager(10)
    text = list(range(40))
    tables = admit(kv)
    run(kv, tables, text)
    child = kv.fork(tables)
    [stats] = kv.stats()
    assert (stats.free, stats.private, stats.shared, stats.cached) == (7, 0, 3, 0)
    kv.grow(child, 40, 1)
    kv.take_copies()
    [stats] = kv.stats()
    assert (stats.free, stats.private, stats.shared, stats.cached) == (6, 2, 2, 0)
    kv.release(child, text)
    kv.release(tables, text)
    [stats] = kv.stats()
    assert (stats.free, stats.private, stats.shared, stats.cached) == (8, 0, 0, 2)
