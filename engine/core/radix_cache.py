"""The prefix cache: a radix tree over token ids whose edges hold whole blocks.

    root(namespace) ── [a a a a | a a b b] ──┬── [c c c c]            block_size 4, four blocks
                                             └── [d d d d | d d e e]

Tokens are compared as they are, so there are no collisions. A node carries, per KV group, one block id for each block
of its edge, or the null block where a window group has let it go. A walk that ends inside an edge splits it, so
that every position which a sequence refers to is the end of a node.

A sequence refers to all the full-attention blocks between the root and its node. So whatever nobody refers to has
nothing referenced below it, and the pool's order of cached blocks is the order of eviction: least recently used
first, leaves before what leads to them, each in O(1). Blocks of a window group may go from anywhere in the tree; a
match needs only the last of them.

A sequence that has computed what the tree has already keeps its duplicates, and adds nothing below them while it
runs: the path there isn't its own. At its end the duplicates are freed, and what it computed behind them is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.core.block_pool import NULL_BLOCK, BlockPool
from engine.core.block_tables import BlockTables, first_visible_block
from engine.core.branches import largest_branches
from engine.core.prefix_cache import PrefixMatch
from engine.core.tree_node import Node
from engine.errors import EngineError
from engine.types import CacheBranch


class RadixCache:
    """See the module's docstring. `windows` holds each group's window, None for full attention."""

    enabled = True

    def __init__(self, block_size: int, pools: Sequence[BlockPool], windows: Sequence[int | None]) -> None:
        self._block_size = block_size
        self._pools = pools
        self._windows = windows
        self._has_windows = any(window is not None for window in windows)
        # A full-attention group, if there is one: its blocks tell whose path it is.
        self._anchor = next((group for group, window in enumerate(windows) if window is None), None)
        self._roots: dict[int, Node] = {}  # by namespace
        self._owners: list[dict[int, Node]] = [{} for _ in pools]  # [group]: block id → its node
        self.num_evicted_blocks = 0

    # --- reading -----------------------------------------------------------------------------------------------------

    def match(self, namespace: int, token_ids: list[int], max_blocks: int) -> PrefixMatch:
        block_ids: list[list[int]] = [[] for _ in self._pools]
        path: list[Node] = []
        node = self._roots.get(namespace)
        depth = 0
        while node is not None and depth < max_blocks:
            child = node.children.get(self._key(token_ids, depth))
            if child is None:
                break
            num_common = self._num_common_blocks(child, token_ids, max_blocks)
            for ids, child_ids in zip(block_ids, child.block_ids, strict=True):
                ids += child_ids[:num_common]
            path.append(child)
            depth += num_common
            node = child if num_common == child.num_blocks else None
        if self._has_windows:
            depth = self._restrict_to_windows(block_ids, depth)
        while path and path[-1].depth >= depth:
            path.pop()
        return PrefixMatch(depth, block_ids, path[-1] if path else None)

    def _restrict_to_windows(self, block_ids: list[list[int]], depth: int) -> int:
        """The longest prefix of which every window group still has what the next token sees. Cuts block_ids to it,
        with null blocks before the window."""
        end, has_hole = depth, True
        while has_hole:
            has_hole = False
            for ids, window in zip(block_ids, self._windows, strict=True):
                seen = ids[first_visible_block(end * self._block_size, window, self._block_size) : end]
                if NULL_BLOCK in seen:
                    seen.reverse()
                    end -= seen.index(NULL_BLOCK) + 1  # the last hole lies behind the end then
                    has_hole = True
        for ids, window in zip(block_ids, self._windows, strict=True):
            first = first_visible_block(end * self._block_size, window, self._block_size)
            ids[:] = [NULL_BLOCK] * first + ids[first:end]
        return end

    def roots(self) -> dict[int, Node]:
        """The trees by namespace; read-only (for checks)."""
        return self._roots

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before children (for checks)."""
        stack = list(self._roots.values())
        while stack:
            children = list(stack.pop().children.values())
            yield from children
            stack += children

    def largest_branches(self, max_branches: int) -> tuple[CacheBranch, ...]:
        return largest_branches(self._roots.values(), self._block_size, max_branches)

    def owner(self, group: int, block_id: int) -> Node | None:
        """The node that holds this block (for checks)."""
        return self._owners[group].get(block_id)

    # --- sequences ---------------------------------------------------------------------------------------------------

    def attach(self, tables: BlockTables, match: PrefixMatch) -> None:
        node = match.node
        if node is None:
            node = self._roots.get(tables.namespace)
            if node is None:
                node = self._roots[tables.namespace] = Node(tables.namespace, None, 0, [], [[] for _ in self._pools])
        elif node.end > match.num_blocks:
            node = self._split(node, match.num_blocks - node.depth)
        node.num_sequences += 1
        tables.node = node

    def attach_fork(self, tables: BlockTables, parent: BlockTables) -> None:
        node = self._node_of(parent)
        node.num_sequences += 1
        tables.node = node

    def detach(self, tables: BlockTables) -> None:
        node = self._node_of(tables)
        node.num_sequences -= 1
        tables.node = None
        self._prune(node)

    def insert(self, tables: BlockTables, token_ids: list[int], num_blocks: int) -> None:
        self._walk(tables, token_ids, num_blocks, None)

    def merge(self, tables: BlockTables, token_ids: list[int]) -> list[dict[int, int]]:
        found: list[dict[int, int]] = [{} for _ in self._pools]
        if self._node_of(tables).end < tables.num_committed_blocks:
            self._walk(tables, token_ids, tables.num_committed_blocks, found)
        return found

    def _walk(
        self, tables: BlockTables, token_ids: list[int], num_blocks: int, found: list[dict[int, int]] | None
    ) -> None:
        """Lead the tables' node down to num_blocks, adding what the tree lacks. Where it has other blocks, acquire
        them and note them in `found`, or stop if that is None."""
        node = self._node_of(tables)
        node.num_sequences -= 1
        while node.end < num_blocks:
            child = node.children.get(self._key(token_ids, node.end))
            if child is None:
                end = num_blocks if found is None else self._end_of_unshared(tables, node.end, num_blocks)
                if end > node.end:
                    node = self._append(node, tables, token_ids, end)
                break
            num_common = self._num_common_blocks(child, token_ids, num_blocks)
            num_own = num_common if found is not None else self._num_own_blocks(child, tables, num_common)
            if num_own == 0:
                break
            if num_own < child.num_blocks:
                child = self._split(child, num_own)
            self._meet(child, tables, found)
            node = child
        node.num_sequences += 1
        tables.node = node

    def _num_own_blocks(self, node: Node, tables: BlockTables, num_blocks: int) -> int:
        """How many of the node's first num_blocks blocks are the tables' own: a fork has put them there."""
        if self._anchor is None:
            return num_blocks
        kept, own = node.block_ids[self._anchor], tables.block_ids[self._anchor]
        count = 0
        while count < num_blocks and kept[count] == own[node.depth + count]:
            count += 1
        return count

    def _end_of_unshared(self, tables: BlockTables, start: int, end: int) -> int:
        """Where the blocks from `start` on end that nobody but these tables refers to. A block that another sequence
        of a fork goes on using may not hang below a path that isn't that sequence's own; its last user adds it."""
        if self._anchor is None:
            return end
        refs, own = self._pools[self._anchor].ref_counts, tables.block_ids[self._anchor]
        while start < end and refs[own[start]] == 1:
            start += 1
        return start

    def _append(self, node: Node, tables: BlockTables, token_ids: list[int], end: int) -> Node:
        """Hang the table's blocks from node.end to `end` below node; returns the node that ends there."""
        start = node.end
        tokens = token_ids[start * self._block_size : end * self._block_size]
        block_ids = [ids[start:end] for ids in tables.block_ids]
        if node.parent is not None and not node.children and node.num_sequences == 0:
            node.tokens += tokens  # nobody else stands at its end: let the edge grow
            for ids, new_ids in zip(node.block_ids, block_ids, strict=True):
                ids += new_ids
            grown = node
        else:
            grown = Node(node.namespace, node, start, tokens, block_ids)
            node.children[tuple(tokens[: self._block_size])] = grown
        for pool, owners, new_ids in zip(self._pools, self._owners, block_ids, strict=True):
            for block_id in new_ids:
                if block_id != NULL_BLOCK:
                    pool.enter_tree(block_id)
                    owners[block_id] = grown
        return grown

    def _meet(self, node: Node, tables: BlockTables, found: list[dict[int, int]] | None) -> None:
        """The tables have blocks for the tokens of a node that is there already."""
        for group, window in enumerate(self._windows):
            pool, own_ids, kept_ids = self._pools[group], tables.block_ids[group], node.block_ids[group]
            for i, kept in enumerate(kept_ids):
                own = own_ids[node.depth + i]
                if own == kept:
                    continue
                if kept == NULL_BLOCK:
                    # On a path that isn't its own a sequence leaves only blocks that nobody goes on using.
                    if found is None or pool.ref_counts[own] == 1:
                        pool.enter_tree(own)
                        kept_ids[i] = own
                        self._owners[group][own] = node
                elif found is not None and window is None:
                    pool.acquire(kept)
                    found[group][node.depth + i] = kept

    # --- eviction ----------------------------------------------------------------------------------------------------

    def next_evicted(self, group: int) -> Node:
        return self._owners[group][self._pools[group].oldest_cached()]

    def evict(self, group: int) -> None:
        block_id = self._pools[group].oldest_cached()
        node = self._owners[group][block_id]
        if self._windows[group] is None:
            if node.children or node.block_ids[group][-1] != block_id:
                raise EngineError(f"block {block_id} of group {group} is cached but not the end of a leaf")
            self._cut_last_block(node)
        else:
            node.block_ids[group][node.block_ids[group].index(block_id)] = NULL_BLOCK
            self._give_up(group, block_id)
        self._prune(node)

    def _cut_last_block(self, node: Node) -> None:
        """Shorten a leaf by one block; a leaf that had only one is gone from the tree."""
        if node.parent is not None and node.num_blocks == 1:
            del node.parent.children[tuple(node.tokens)]
        del node.tokens[-self._block_size :]
        for group, ids in enumerate(node.block_ids):
            block_id = ids.pop()
            if block_id != NULL_BLOCK:
                self._give_up(group, block_id)

    def _give_up(self, group: int, block_id: int) -> None:
        del self._owners[group][block_id]
        self._pools[group].leave_tree(block_id)
        self.num_evicted_blocks += 1

    def _prune(self, node: Node) -> None:
        """Remove what serves nobody from `node` upwards: the ends of leaves at which no sequence stands and no group
        has a block, and a root with nothing below it."""
        while not node.children and node.num_sequences == 0:
            if node.parent is None:
                del self._roots[node.namespace]
                return
            while node.tokens and all(ids[-1] == NULL_BLOCK for ids in node.block_ids):
                self._cut_last_block(node)
            if node.tokens:
                return
            node = node.parent

    # --- structure ---------------------------------------------------------------------------------------------------

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Give the first num_blocks of an edge a node of their own, above; returns it. `node` keeps the rest, and
        with it all sequences that stand at its end."""
        cut = num_blocks * self._block_size
        upper_ids = [ids[:num_blocks] for ids in node.block_ids]
        upper = Node(node.namespace, node.parent, node.depth, node.tokens[:cut], upper_ids)
        upper.num_kept = node.num_kept
        if node.parent is not None:
            node.parent.children[tuple(node.tokens[: self._block_size])] = upper
        node.parent = upper
        node.depth += num_blocks
        del node.tokens[:cut]
        for ids, owners, moved in zip(node.block_ids, self._owners, upper_ids, strict=True):
            del ids[:num_blocks]
            for block_id in moved:
                if block_id != NULL_BLOCK:
                    owners[block_id] = upper
        upper.children[tuple(node.tokens[: self._block_size])] = node
        return upper

    def _key(self, token_ids: list[int], depth: int) -> tuple[int, ...]:
        return tuple(token_ids[depth * self._block_size : (depth + 1) * self._block_size])

    def _num_common_blocks(self, node: Node, token_ids: list[int], max_blocks: int) -> int:
        """How many blocks of the edge agree with the tokens (the first does), up to position max_blocks."""
        block_size = self._block_size
        count = min(node.num_blocks, max_blocks - node.depth)
        start = node.depth * block_size
        wanted = token_ids[start : start + count * block_size]
        if wanted == node.tokens[: count * block_size]:
            return count
        low = block_size
        while wanted[low : low + block_size] == node.tokens[low : low + block_size]:
            low += block_size
        return low // block_size

    @staticmethod
    def _node_of(tables: BlockTables) -> Node:
        if tables.node is None:
            raise EngineError("these tables have been detached from the prefix cache")
        return tables.node
