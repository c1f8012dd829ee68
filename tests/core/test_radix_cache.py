"""The tree by hand, and against a naive model of it."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from itertools import product

import pytest

from engine.core.block_pool import NULL_BLOCK, BlockPool
from engine.core.block_tables import BlockTables, first_visible_block
from engine.core.prefix_cache import NoPrefixCache
from engine.core.radix_cache import RadixCache
from engine.core.tree_node import Node
from engine.errors import EngineError
from engine.types import CacheBranch


class Tree:
    """A tree of full-attention blocks of 2 tokens, and sequences as lists of tokens."""

    def __init__(self, num_blocks: int = 40) -> None:
        self.pool = BlockPool(num_blocks + 1)
        self.cache = RadixCache(2, [self.pool], [None])

    def start(self, token_ids: list[int], namespace: int = 0) -> BlockTables:
        """Refer to what is cached, allocate the rest, add nothing yet."""
        match = self.cache.match(namespace, token_ids, len(token_ids) // 2)
        tables = BlockTables(namespace, match.block_ids)
        for block_id in match.block_ids[0]:
            self.pool.acquire(block_id)
        self.cache.attach(tables, match)
        tables.num_committed_blocks = match.num_blocks
        for _ in range(len(token_ids) // 2 - match.num_blocks):
            if self.pool.num_free == 0:
                self.cache.evict(0)
            tables.block_ids[0].append(self.pool.allocate())
        return tables

    def commit(self, tables: BlockTables, token_ids: list[int]) -> None:
        self.cache.insert(tables, token_ids, len(token_ids) // 2)
        tables.num_committed_blocks = len(token_ids) // 2

    def release(self, tables: BlockTables, token_ids: list[int]) -> None:
        found = self.cache.merge(tables, token_ids)[0]
        for index in range(tables.num_blocks - 1, -1, -1):
            self.pool.release(tables.block_ids[0][index])
            if index in found:
                self.pool.release(found[index])
        self.cache.detach(tables)

    def run(self, token_ids: list[int], namespace: int = 0) -> list[int]:
        """A sequence from begin to end; its blocks."""
        tables = self.start(token_ids, namespace)
        self.commit(tables, token_ids)
        block_ids = list(tables.block_ids[0])
        self.release(tables, token_ids)
        return block_ids

    def matched(self, token_ids: list[int], namespace: int = 0) -> list[int]:
        return self.cache.match(namespace, token_ids, len(token_ids) // 2).block_ids[0]

    def edges(self) -> list[tuple[int, list[int], list[int]]]:
        """(depth, tokens, blocks) of all nodes."""
        nodes = list(self.cache.nodes())
        return sorted((node.depth, node.tokens, node.block_ids[0]) for node in nodes)


def test_a_run_text_is_found_again_in_whole_blocks() -> None:
    tree = Tree()
    assert tree.run([1, 2, 3, 4, 5, 6, 7]) == [1, 2, 3]
    assert tree.matched([1, 2, 3, 4, 5, 6, 7, 8]) == [1, 2, 3]
    assert tree.matched([1, 2, 3, 4, 5]) == [1, 2]
    assert tree.matched([1, 2, 3, 9, 5, 6]) == [1]
    assert tree.matched([1]) == []
    assert tree.matched([2, 2]) == []


def test_an_edge_is_split_where_a_text_diverges_inside_it() -> None:
    tree = Tree()
    tree.run([1, 1, 2, 2, 3, 3, 4, 4])
    assert tree.edges() == [(0, [1, 1, 2, 2, 3, 3, 4, 4], [1, 2, 3, 4])]
    assert tree.run([1, 1, 2, 2, 9, 9]) == [1, 2, 5]
    assert tree.edges() == [(0, [1, 1, 2, 2], [1, 2]), (2, [3, 3, 4, 4], [3, 4]), (2, [9, 9], [5])]


def test_a_growing_text_stays_one_edge() -> None:
    tree = Tree()
    text = [1, 1]
    tables = tree.start(text)
    for token in range(2, 8):
        tree.commit(tables, text)
        text += [token, token]
        tables.block_ids[0].append(tree.pool.allocate())
    tree.commit(tables, text)
    assert tree.edges() == [(0, text, [1, 2, 3, 4, 5, 6, 7])]


def test_an_edge_at_whose_end_somebody_stands_does_not_grow() -> None:
    tree = Tree()
    tables = tree.start([1, 1])
    tree.commit(tables, [1, 1])
    tree.start([1, 1])  # stands at the end of the edge, too
    tables.block_ids[0].append(tree.pool.allocate())
    tree.commit(tables, [1, 1, 2, 2])
    assert tree.edges() == [(0, [1, 1], [1]), (1, [2, 2], [2])]


def test_namespaces_share_nothing() -> None:
    tree = Tree()
    tree.run([1, 1, 2, 2], namespace=7)
    assert tree.matched([1, 1, 2, 2], namespace=7) == [1, 2]
    assert tree.matched([1, 1, 2, 2], namespace=8) == []


def test_a_namespace_without_blocks_leaves_nothing_behind() -> None:
    tree = Tree()
    tree.run([1, 1], namespace=7)
    tree.cache.evict(0)
    assert tree.cache.roots() == {}


def test_the_least_recently_used_leaf_goes_first_from_its_end() -> None:
    tree = Tree()
    tree.run([1, 1, 2, 2, 3, 3])  # blocks 1 2 3
    tree.run([1, 1, 2, 2, 4, 4])  # blocks 1 2 4
    tree.run([5, 5, 6, 6])  # blocks 5 6
    tree.run([1, 1, 2, 2, 3, 3])  # used again
    order = []
    while tree.pool.num_cached:
        order.append(tree.pool.oldest_cached())
        tree.cache.evict(0)
    assert order == [4, 6, 5, 3, 2, 1]
    assert tree.edges() == []
    assert tree.cache.num_evicted_blocks == 6


def test_a_parent_whose_last_child_goes_is_evictable_at_once() -> None:
    tree = Tree(num_blocks=4)
    tree.run([1, 1, 2, 2])
    tree.run([1, 1, 3, 3])
    assert tree.pool.num_free == 1
    assert sorted(tree.run([9, 9, 8, 8, 7, 7, 6, 6])) == [1, 2, 3, 4]
    assert tree.matched([1, 1]) == []


def test_what_a_sequence_refers_to_stays() -> None:
    tree = Tree(num_blocks=4)
    tree.run([1, 1, 2, 2, 3, 3])
    tables = tree.start([1, 1, 2, 2])
    assert tree.pool.num_cached == 1
    tree.cache.evict(0)
    with pytest.raises(EngineError):
        tree.cache.evict(0)
    assert tables.block_ids[0] == tree.matched([1, 1, 2, 2]) == [1, 2]


def test_a_duplicate_stays_private_and_is_freed_at_the_end() -> None:
    tree = Tree()
    first, second = tree.start([1, 1, 2, 2]), tree.start([1, 1, 2, 2])
    tree.commit(first, [1, 1, 2, 2])
    tree.commit(second, [1, 1, 2, 2])
    assert (first.block_ids, second.block_ids) == ([[1, 2]], [[3, 4]])
    assert (tree.pool.num_shared, tree.pool.num_private) == (2, 2)
    tree.release(first, [1, 1, 2, 2])
    assert tree.matched([1, 1, 2, 2]) == [1, 2]
    tree.release(second, [1, 1, 2, 2])
    assert (tree.pool.num_free, tree.pool.num_cached) == (38, 2)


def test_what_was_computed_behind_a_duplicate_is_added_at_the_end() -> None:
    tree = Tree()
    first, second = tree.start([1, 1]), tree.start([1, 1, 2, 2])
    tree.commit(first, [1, 1])
    tree.commit(second, [1, 1, 2, 2])
    assert tree.matched([1, 1, 2, 2]) == [1]
    tree.release(second, [1, 1, 2, 2])
    assert tree.matched([1, 1, 2, 2]) == [1, 3]
    assert tree.pool.ref_counts[:4] == [0, 1, 0, 0]
    tree.release(first, [1, 1])
    assert tree.pool.cached_ids() == [3, 1]


def test_no_prefix_cache_finds_nothing() -> None:
    cache = NoPrefixCache(2)
    assert cache.match(0, [1, 2, 3, 4], 2) == (0, [[], []], None)
    with pytest.raises(EngineError):
        cache.evict(0)


# --- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holes", list(product([False, True], repeat=5)))
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9, 10])
def test_a_hit_needs_all_that_the_next_token_sees_in_a_window_group(window: int, holes: tuple[bool, ...]) -> None:
    pools = [BlockPool(9), BlockPool(9)]
    cache = RadixCache(2, pools, [None, window])
    text = list(range(10))
    tables = BlockTables(0, [[pool.allocate() for _ in range(5)] for pool in pools])
    cache.attach(tables, cache.match(0, text, 5))
    for index, hole in enumerate(holes):
        if hole:
            pools[1].release(tables.block_ids[1][index])
            tables.block_ids[1][index] = NULL_BLOCK
    cache.insert(tables, text, 5)

    def usable(num_blocks: int) -> bool:
        return not any(holes[first_visible_block(2 * num_blocks, window, 2) : num_blocks])

    match = cache.match(0, text, 5)
    assert match.num_blocks == max(k for k in range(6) if usable(k))
    first = first_visible_block(2 * match.num_blocks, window, 2)
    assert match.block_ids[0] == [1, 2, 3, 4, 5][: match.num_blocks]
    assert match.block_ids[1] == [0] * min(first, match.num_blocks) + [1, 2, 3, 4, 5][first : match.num_blocks]


def test_a_window_block_goes_alone_and_the_path_stays() -> None:
    pools = [BlockPool(9), BlockPool(9)]
    cache = RadixCache(2, pools, [None, 2])
    tables = BlockTables(0, [[pool.allocate() for _ in range(3)] for pool in pools])
    text = [1, 1, 2, 2, 3, 3]
    cache.attach(tables, cache.match(0, text, 3))
    cache.insert(tables, text, 3)
    pools[1].release(1)  # its first block has left the window
    assert pools[1].num_cached == 1
    cache.evict(1)
    [node] = cache.nodes()
    assert node.block_ids == [[1, 2, 3], [0, 2, 3]]
    assert cache.match(0, text, 3).block_ids == [[1, 2, 3], [0, 0, 3]]
    assert cache.match(0, text, 1).num_blocks == 0  # a token behind block 1 would see it


def test_a_hole_is_filled_by_the_next_who_computes_it() -> None:
    pools = [BlockPool(9), BlockPool(9)]
    cache = RadixCache(2, pools, [3, 2])  # without full attention a path belongs to everybody
    text = [1, 1, 2, 2]
    first = BlockTables(0, [[pool.allocate() for _ in range(2)] for pool in pools])
    cache.attach(first, cache.match(0, text, 2))
    cache.insert(first, text, 2)
    pools[1].release(2)
    cache.evict(1)
    assert cache.match(0, text, 2).num_blocks == 1
    second = BlockTables(0, [[pool.allocate() for _ in range(2)] for pool in pools])
    cache.attach(second, cache.match(0, text, 0))
    cache.insert(second, text, 2)
    assert second.block_ids == [[3, 4], [2, 3]]
    assert cache.match(0, text, 2).block_ids == [[0, 2], [0, 3]]


def test_an_edge_without_any_block_is_removed_when_nobody_stands_at_its_end() -> None:
    pool = BlockPool(9)
    cache = RadixCache(2, [pool], [2])
    text = [1, 1, 2, 2]
    tables = BlockTables(0, [[pool.allocate(), pool.allocate()]])
    cache.attach(tables, cache.match(0, text, 2))
    cache.insert(tables, text, 2)
    for block_id in (2, 1):
        pool.release(block_id)
        cache.evict(0)
    assert [node.block_ids for node in cache.nodes()] == [[[0, 0]]]
    cache.detach(tables)
    assert cache.roots() == {}


# --- against a naive model -------------------------------------------------------------------------------------------


@dataclass
class NaiveTree:
    """Every cached prefix on its own: (namespace, tokens) → block, users, time of the last release."""

    blocks: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    users: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    released_at: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    clock: int = 0

    def match(self, namespace: int, token_ids: list[int]) -> list[int]:
        found = []
        for end in range(2, len(token_ids) + 1, 2):
            block_id = self.blocks.get((namespace, tuple(token_ids[:end])))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def insert(self, namespace: int, token_ids: list[int], block_ids: list[int]) -> None:
        """Up to the first prefix that is there in another block."""
        for end, block_id in zip(range(2, len(token_ids) + 1, 2), block_ids, strict=False):
            key = (namespace, tuple(token_ids[:end]))
            if self.blocks.setdefault(key, block_id) != block_id:
                return

    def touch(self, namespace: int, token_ids: list[int], block_ids: list[int]) -> None:
        """At the end of a sequence: add what is missing, then all of its prefixes are used, the longest first."""
        for end in range(len(block_ids) * 2, 0, -2):
            key = (namespace, tuple(token_ids[:end]))
            self.blocks.setdefault(key, block_ids[end // 2 - 1])
            self.clock += 1
            self.released_at[key] = self.clock

    def victim(self, in_use: set[int]) -> tuple[int, tuple[int, ...]]:
        """The unreferenced leaf used least recently."""
        leaves = [
            key
            for key, block_id in self.blocks.items()
            if block_id not in in_use
            and not any(k[0] == key[0] and k[1][: len(key[1])] == key[1] and k != key for k in self.blocks)
        ]
        return min(leaves, key=lambda key: self.released_at[key])


@pytest.mark.parametrize("seed", range(10))
def test_the_tree_equals_the_naive_model(seed: int) -> None:
    rng = random.Random(seed)
    tree, naive = Tree(num_blocks=24), NaiveTree()
    live: list[tuple[int, list[int], BlockTables]] = []
    log: list[str] = [f"seed {seed}"]

    def evict() -> None:
        in_use = {block for _, _, tables in live for block in tables.block_ids[0]}
        key = naive.victim(in_use)
        log.append(f"evict {key}")
        assert naive.blocks.pop(key) == tree.pool.oldest_cached()
        tree.cache.evict(0)

    try:
        for _ in range(1_500):
            namespace, text = rng.randrange(2), [rng.choice([0, 0, 1]) for _ in range(rng.randrange(14))]
            assert tree.matched(text, namespace) == naive.match(namespace, text)
            if len(live) < 4 and rng.random() < 0.5:
                log.append(f"run {namespace} {text}")
                needed = len(text) // 2 - len(naive.match(namespace, text))
                revived = [b for b in naive.match(namespace, text) if tree.pool.ref_counts[b] == 0]
                if tree.pool.num_available - len(revived) < needed:
                    continue
                live.append((namespace, text, tree.start(text, namespace)))
                # start() evicts in the tree alone: let the model follow, block by block
                for key in [k for k, b in naive.blocks.items() if tree.cache.owner(0, b) is None]:
                    del naive.blocks[key]
            elif live and rng.random() < 0.4:
                namespace, text, tables = rng.choice(live)
                log.append(f"commit {namespace} {text}")
                tree.commit(tables, text)
                naive.insert(namespace, text, tables.block_ids[0])
            elif live and rng.random() < 0.6:
                namespace, text, tables = live.pop(rng.randrange(len(live)))
                log.append(f"end {namespace} {text}")
                naive.touch(namespace, text, tables.block_ids[0][: tables.num_committed_blocks])
                tree.release(tables, text)
            elif tree.pool.num_cached:
                evict()
        for _, text, tables in live:
            tree.release(tables, text)
    except BaseException:
        sys.stdout.write("\n".join(log))
        raise


def test_a_root_has_no_tokens_of_its_own() -> None:
    tree = Tree()
    tree.run([1, 1])
    root = tree.cache.roots()[0]
    assert isinstance(root, Node)
    assert (root.tokens, root.end, root.parent) == ([], 0, None)


def test_the_largest_branches_come_first_and_after_their_parents() -> None:
    tree = Tree()
    tree.run([1, 1, 2, 2, 3, 3])
    tree.run([1, 1, 2, 2, 4, 4, 5, 5])
    tree.run([9, 9], namespace=7)
    running = [1, 1, 2, 2, 4, 4, 5, 5, 6, 6]
    tree.commit(tree.start(running), running)
    branches = tree.cache.largest_branches(10)
    assert branches == (
        CacheBranch(-1, start_tokens=0, num_tokens=4, subtree_tokens=12, num_sequences=1),
        CacheBranch(0, start_tokens=4, num_tokens=6, subtree_tokens=6, num_sequences=1),
        CacheBranch(-1, start_tokens=0, num_tokens=2, subtree_tokens=2, num_sequences=0),
        CacheBranch(0, start_tokens=4, num_tokens=2, subtree_tokens=2, num_sequences=0),
    )
    assert tree.cache.largest_branches(1) == branches[:1]
    assert NoPrefixCache(1).largest_branches(5) == ()
