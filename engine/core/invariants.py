"""The books of the policy core, checked against each other.

Nothing here is fast; tests call it after each operation, the engine when it is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from engine.core.block_pool import NULL_BLOCK, BlockState
from engine.core.block_tables import BlockTables
from engine.core.kv_manager import KVManager
from engine.core.radix_cache import RadixCache
from engine.core.request import Sequence, Status
from engine.core.roster import Roster
from engine.core.tree_node import Node
from engine.errors import EngineError


class InvariantViolation(EngineError):
    """The books don't add up; the message says where."""


def check(roster: Roster, steps_under_way: Iterable[Iterable[Sequence]]) -> None:
    """Raises InvariantViolation at the first thing that is wrong. `steps_under_way` holds whom each step names."""
    kv, host = roster.kv, roster.host
    holders = [*roster.running, *roster.departing]
    check_kv(kv, [roster.tables_of(seq) for seq in holders])
    for seq in holders:
        _check_holder(kv, seq)
    _check_roster(roster, Counter(id(seq) for step in steps_under_way for seq in step))
    if not holders:
        _check_idle(kv)
    if host is not None:
        tables = [seq.parked.tables for seq in roster.queue if seq.parked is not None]
        _require(host.num_parked == len(tables), f"{host.num_parked} are parked, not {len(tables)}")
        tables += host.lent_tables()
        check_kv(host.kv, tables)
        if not tables:
            _check_idle(host.kv)


def _check_idle(kv: KVManager) -> None:
    for group, pool in enumerate(kv.pools):
        _require(
            pool.num_available == pool.num_usable,
            f"idle, but group {group} has {pool.num_free} free + {pool.num_cached} cached of {pool.num_usable} blocks",
        )


def check_kv(kv: KVManager, live: list[BlockTables]) -> None:
    """The pools against the live tables and the tree, which are all there is."""
    for group in range(len(kv.pools)):
        _check_pool(kv, group, live)
    if isinstance(kv.cache, RadixCache):
        _check_tree(kv, kv.cache, live)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolation(message)


def _check_pool(kv: KVManager, group: int, live: list[BlockTables]) -> None:
    """The four states partition the ids, and each reference count is that of the tables."""
    pool = kv.pools[group]
    refs = [0] * pool.num_blocks
    for tables in live:
        for block_id in tables.block_ids[group]:
            refs[block_id] += 1
    refs[NULL_BLOCK] = 0
    if pool.ref_counts != refs:
        raise InvariantViolation(f"group {group} has ref_counts {pool.ref_counts}, but the tables make {refs}")
    states: dict[BlockState, list[int]] = {state: [] for state in BlockState}
    for block_id in range(1, pool.num_blocks):
        states[pool.state(block_id)].append(block_id)
    for state, ids in ((BlockState.FREE, pool.free_ids()), (BlockState.CACHED, pool.cached_ids())):
        if sorted(ids) != states[state]:
            raise InvariantViolation(
                f"the {state.value} list of group {group} is {ids}, {state.value} are {states[state]}"
            )
    for state, count in ((BlockState.PRIVATE, pool.num_private), (BlockState.SHARED, pool.num_shared)):
        if count != len(states[state]):
            raise InvariantViolation(f"group {group} counts {count} {state.value} blocks, there are {states[state]}")


def _check_tree(kv: KVManager, cache: RadixCache, live: list[BlockTables]) -> None:
    """Shape of the tree, its blocks against the pools, and the sequences' places in it."""
    standing = Counter(id(tables.node) for tables in live)
    in_tree: list[list[int]] = [[] for _ in kv.pools]
    for namespace, root in cache.roots().items():
        _require(root.namespace == namespace and root.parent is None and not root.tokens, "a root is no root")
        _require(bool(root.children) or root.num_sequences > 0, f"the root of {namespace} serves nobody")
    for node in [*cache.roots().values(), *cache.nodes()]:
        _check_node(kv, node)
        where = f"the node of {node.tokens} at depth {node.depth}"
        _require(node.num_sequences == standing[id(node)], f"{where} miscounts the sequences at its end")
        for group, ids in enumerate(node.block_ids):
            for block_id in ids:
                if block_id != NULL_BLOCK:
                    in_tree[group].append(block_id)
                    _require(cache.owner(group, block_id) is node, f"{where} doesn't own block {block_id}")
    for group, (pool, ids) in enumerate(zip(kv.pools, in_tree, strict=True)):
        _require(len(ids) == len(set(ids)), f"a block of group {group} is in the tree twice: {sorted(ids)}")
        marked = [b for b in range(1, pool.num_blocks) if pool.is_in_tree(b)]
        _require(sorted(ids) == marked, f"group {group}: the tree holds {sorted(ids)}, the pool says {marked}")
        if kv.windows[group] is None:
            _check_eviction_order(cache, group, pool.cached_ids())


def _check_node(kv: KVManager, node: Node) -> None:
    where = f"the node of {node.tokens} at depth {node.depth}"
    for window, ids in zip(kv.windows, node.block_ids, strict=True):
        _require(len(node.tokens) == len(ids) * kv.block_size, f"{where} doesn't hold whole blocks: {ids}")
        _require(window is not None or NULL_BLOCK not in ids, f"{where} lacks a full-attention block: {ids}")
    for key, child in node.children.items():
        first = tuple(child.tokens[: kv.block_size])
        _require(len(first) == kv.block_size, f"{where} has an empty child")
        _require(key == first, f"{where} finds the child of {first} under {key}")
        _require(child.parent is node and child.depth == node.end, f"{where} isn't the parent of its child")
        _require(child.namespace == node.namespace, f"{where} has a child in another namespace")


def _check_eviction_order(cache: RadixCache, group: int, cached_ids: list[int]) -> None:
    """Whoever evicts from the front always finds the end of a leaf: no block stands before one below it."""
    rank = {block_id: i for i, block_id in enumerate(cached_ids)}
    for node in cache.nodes():
        ids = node.block_ids[group]
        below = [child.block_ids[group][0] for child in node.children.values()]
        pairs = [*pairwise(ids), *[(ids[-1], block_id) for block_id in below]]
        for upper, lower in pairs:
            if upper in rank:
                _require(lower in rank, f"block {upper} is cached, but {lower} below it is in use")
                _require(rank[lower] < rank[upper], f"block {upper} would be evicted before {lower} below it")


def _check_holder(kv: KVManager, seq: Sequence) -> None:
    """A sequence's tables reach as far as it has come, and no further back than its windows."""
    tables = seq.tables
    if tables is None:
        raise InvariantViolation(f"{seq.seq_id} runs without blocks")
    for group, ids in enumerate(tables.block_ids):
        named = [block_id for block_id in ids if block_id != NULL_BLOCK]
        _require(len(named) == len(set(named)), f"{seq.seq_id} has a block twice: {ids}")
        _require(len(ids) == tables.num_blocks, f"the tables of {seq.seq_id} differ in length")
        _require(
            len(ids) * kv.block_size >= seq.num_computed_tokens,
            f"{seq.seq_id} has {len(ids)} blocks for {seq.num_computed_tokens} tokens",
        )
        first = tables.first_live[group]
        _require(
            all(b == NULL_BLOCK for b in ids[:first]) and NULL_BLOCK not in ids[first:],
            f"group {group} of {seq.seq_id} should begin at entry {first}: {ids}",
        )
        _require(kv.windows[group] is not None or first == 0, f"full attention of {seq.seq_id} lacks blocks")
    committed = tables.num_committed_blocks * kv.block_size
    _require(committed <= seq.num_computed_tokens, f"{seq.seq_id} has committed {committed} tokens uncomputed")
    if tables.node is not None:
        path: list[int] = []
        node: Node | None = tables.node
        while node is not None:
            path[:0] = node.tokens
            for window, kept, own in zip(kv.windows, node.block_ids, tables.block_ids, strict=True):
                _require(
                    window is not None or kept == own[node.depth : node.end],
                    f"{seq.seq_id} has {own} on the path of {kept}",
                )
            node = node.parent
        _require(
            len(path) <= committed and path == seq.token_ids[: len(path)],
            f"{seq.seq_id} stands at {path}, which isn't the begin of its {committed} committed tokens",
        )
        _require(tables.node.namespace == seq.request.cache_namespace, f"{seq.seq_id} left its namespace")


def _check_roster(roster: Roster, named: Counter[int]) -> None:
    """Each live choice is in exactly one place, and as many steps under way name it (by its identity) as it thinks."""
    leaving = [seq for seq in roster.departing if seq.status is Status.LEAVING]
    places = [
        *[(seq, Status.WAITING) for seq in roster.queue],
        *[(seq, Status.RUNNING) for seq in roster.running],
        *[(seq, Status.LEAVING) for seq in leaving],
    ]
    live = [seq for choices in roster.live.values() for seq in choices.values()]
    _require(
        sorted(seq.seq_id for seq, _ in places) == sorted(seq.seq_id for seq in live),
        f"live are {[seq.seq_id for seq in live]}, but placed are {[seq.seq_id for seq, _ in places]}",
    )
    for seq, status in places:
        _require(seq.status is status, f"{seq.seq_id} is {seq.status.value}, not {status.value}")
        _require((seq.tables is None) == (status is Status.WAITING), f"{seq.seq_id} has blocks while it waits")
        _require(seq.parked is None or status is Status.WAITING, f"{seq.seq_id} is parked, but {status.value}")
        _require(seq.num_in_flight == named[id(seq)], f"{seq.seq_id} miscounts its steps under way")
    for seq in roster.departing:
        _require(seq.num_in_flight > 0, f"{seq.seq_id} departs, but no step is under way for it")
