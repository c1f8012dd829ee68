"""The KV memory as the scheduler sees it: one facade over pools, block tables and prefix cache.

The whole conversation for a sequence: match → fits? → admit → (grow → commit)… → release, and fork in between.
"Does not fit now" is a return value; only breaking the rules of the conversation raises (EngineError).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.block_pool import NULL_BLOCK, BlockPool
from engine.core.block_tables import BlockTables, first_visible_block
from engine.core.plan import BlockCopy, BlockTableTail, KVCapacity
from engine.core.prefix_cache import NoPrefixCache, PrefixCache, PrefixMatch
from engine.core.radix_cache import RadixCache
from engine.core.tree_node import Node
from engine.types import KVGroupStats


class KVManager:
    """Owns every block of every group. `max_step_tokens` bounds num_tokens of a grow()."""

    def __init__(self, capacity: KVCapacity, *, prefix_cache: bool, max_step_tokens: int) -> None:
        self.block_size = capacity.block_size
        self.windows = tuple([group.window for group in capacity.groups])
        self.pools = tuple([BlockPool(group.num_blocks) for group in capacity.groups])
        self.cache: PrefixCache = (
            RadixCache(self.block_size, self.pools, self.windows) if prefix_cache else NoPrefixCache(len(self.pools))
        )
        self.before_eviction: Callable[[Node], None] | None = None  # told whose last block is about to go
        self._has_windows = any(window is not None for window in self.windows)
        self._copies: list[BlockCopy] = []
        # [group]: blocks that a sequence holds at most while a step of max_step_tokens runs; None = no bound
        self._window_blocks = tuple(
            [None if w is None else self._num_blocks(w + max_step_tokens) + 1 for w in self.windows]
        )

    # --- sizes -------------------------------------------------------------------------------------------------------

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing_blocks(self, group: int, num_blocks: int, num_tokens: int) -> int:
        """Blocks that a sequence with num_blocks table entries still needs to hold num_tokens; for a window group an
        upper bound that counts what it gives back on the way."""
        missing = self._num_blocks(num_tokens) - num_blocks
        bound = self._window_blocks[group]
        return max(0, missing if bound is None else min(missing, bound))

    def why_never_fits(self, num_tokens: int) -> str | None:
        """None if a sequence alone can reach num_tokens computed tokens, one by one if need be; else the reason."""
        for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            needed = self._num_blocks(num_tokens)
            if window is not None:
                needed = min(needed, self._num_blocks(window - 1) + 1)
            if needed > pool.num_usable:
                return (
                    f"{num_tokens} tokens need {needed} blocks of {self.block_size} tokens in KV group {group}, "
                    f"which has {pool.num_usable}"
                )
        return None

    def stats(self) -> tuple[KVGroupStats, ...]:
        return tuple(
            [KVGroupStats(p.num_free, p.num_private, p.num_shared, p.num_cached) for p in self.pools],
        )

    # --- admission ---------------------------------------------------------------------------------------------------

    def match(self, namespace: int, token_ids: list[int], max_tokens: int) -> PrefixMatch:
        """The longest cached prefix of at most max_tokens, in whole blocks. Changes nothing."""
        return self.cache.match(namespace, token_ids, max_tokens // self.block_size)

    def fits(self, match: PrefixMatch, num_tokens: int, spare: Sequence[int]) -> bool:
        """Whether a new sequence of num_tokens that begins with the match would leave spare[group] blocks."""
        for group, pool in enumerate(self.pools):
            refs = pool.ref_counts
            revived = sum([refs[b] == 0 for b in match.block_ids[group] if b != NULL_BLOCK])
            needed = self.missing_blocks(group, match.num_blocks, num_tokens)
            if pool.num_available - revived - needed < spare[group]:
                return False
        return True

    def admit(self, namespace: int, match: PrefixMatch) -> BlockTables:
        """Tables that begin with the match, referenced from now on."""
        tables = BlockTables(namespace, match.block_ids)
        for group, (pool, ids) in enumerate(zip(self.pools, match.block_ids, strict=True)):
            for block_id in ids:
                if block_id != NULL_BLOCK:
                    pool.acquire(block_id)
            tables.first_live[group] = self._first_visible(group, match.num_blocks * self.block_size)
        self.cache.attach(tables, match)
        tables.num_committed_blocks = match.num_blocks
        return tables

    def fork(self, parent: BlockTables) -> BlockTables:
        """Tables that share all of the parent's blocks; both copy before they write a shared one."""
        tables = BlockTables(parent.namespace, [list(ids) for ids in parent.block_ids])
        for pool, ids in zip(self.pools, parent.block_ids, strict=True):
            for block_id in ids:
                if block_id != NULL_BLOCK:
                    pool.acquire(block_id)
        tables.first_live = list(parent.first_live)
        tables.num_committed_blocks = parent.num_committed_blocks
        tables.forked = parent.forked = True
        self.cache.attach_fork(tables, parent)
        return tables

    def mirror(self, tables: BlockTables, block_ids: Sequence[Sequence[int]]) -> list[BlockCopy] | None:
        """Lengthen tables to be like block_ids [group], another manager's: a new block for each of theirs.

        Returns the copies to be made, from theirs to the new ones; None if they don't all fit: nothing has changed.
        """
        start = tables.num_blocks
        for pool, ids in zip(self.pools, block_ids, strict=True):
            if sum([block_id != NULL_BLOCK for block_id in ids[start:]]) > pool.num_available:
                return None
        copies: list[BlockCopy] = []
        for group, ids in enumerate(block_ids):
            for theirs in ids[start:]:
                ours = NULL_BLOCK if theirs == NULL_BLOCK else self._allocate(group)
                tables.block_ids[group].append(ours)
                if ours != NULL_BLOCK:
                    copies.append(BlockCopy(group, theirs, ours))
        tables.unchanged_tails = None
        return copies

    # --- running -----------------------------------------------------------------------------------------------------

    def grow(self, tables: BlockTables, start: int, num_tokens: int) -> int:
        """Make room for tokens start … start + num_tokens − 1, the next ones of the sequence; evicts if need be.

        Returns how many of them have room: num_tokens, or less if blocks are short, or 0, and then nothing has
        changed. A partly filled block that others refer to is replaced by a copy (see take_copies).
        """
        end = start + num_tokens
        if end <= tables.num_blocks * self.block_size and not tables.forked:
            return num_tokens
        copied = self._shared_tails(tables, start)
        for group, pool in enumerate(self.pools):
            spare = pool.num_available - (group in copied)
            if spare < 0:
                return 0
            end = min(end, (tables.num_blocks + spare) * self.block_size)
        if end <= start:
            return 0
        for group in copied:
            self._copy_block(tables, group, start // self.block_size)
        tables.forked = False
        num_new = self._num_blocks(end) - tables.num_blocks
        if num_new:
            tables.unchanged_tails = None
            for group, ids in enumerate(tables.block_ids):
                ids += [self._allocate(group) for _ in range(num_new)]
        return end - start

    def _shared_tails(self, tables: BlockTables, start: int) -> list[int]:
        """Groups in which the block that holds `start` has tokens before it and other readers."""
        if not tables.forked or start % self.block_size == 0:
            return []
        index = start // self.block_size
        groups = enumerate(zip(self.pools, tables.block_ids, strict=True))
        return [group for group, (pool, ids) in groups if pool.ref_counts[ids[index]] > 1]

    def _copy_block(self, tables: BlockTables, group: int, index: int) -> None:
        source = tables.block_ids[group][index]
        target = self._allocate(group)
        self._copies.append(BlockCopy(group, source, target))
        pool = self.pools[group]
        pool.hold(source)  # in this step it may not become the target of another copy
        pool.release(source)
        tables.block_ids[group][index] = target
        tables.mark_changed(group, index)

    def _allocate(self, group: int) -> int:
        pool = self.pools[group]
        if pool.num_free == 0:
            if self.before_eviction is not None:
                self.before_eviction(self.cache.next_evicted(group))
            self.cache.evict(group)
        return pool.allocate()

    def take_tails(self, tables: BlockTables) -> tuple[BlockTableTail, ...]:
        """What changed in each table since the last call; everything at the first."""
        if tables.unchanged_tails is not None:
            return tables.unchanged_tails
        tails = []
        for group, ids in enumerate(tables.block_ids):
            start = tables.changed_from[group]
            tails.append(BlockTableTail(start, tuple(ids[start:])))
            tables.changed_from[group] = len(ids)
        tables.unchanged_tails = tuple([BlockTableTail(len(ids), ()) for ids in tables.block_ids])
        return tuple(tails)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies that the tables handed out since the last call rely on; ends the planning of a step."""
        if not self._copies:
            return ()
        copies = tuple(self._copies)
        self._copies.clear()
        for pool in self.pools:
            pool.end_step()
        return copies

    def commit(self, tables: BlockTables, token_ids: list[int], num_computed_tokens: int) -> None:
        """The KV of the first num_computed_tokens exists: full blocks enter the cache, what left a window is freed."""
        num_full = num_computed_tokens // self.block_size
        if num_full > tables.num_committed_blocks:
            self.cache.insert(tables, token_ids, num_full)
            tables.num_committed_blocks = num_full
        if self._has_windows:
            self.slide(tables, num_computed_tokens)

    def slide(self, tables: BlockTables, position: int) -> None:
        """Give up the blocks that a token at `position` and those behind it can't see."""
        for group, ids in enumerate(tables.block_ids):
            first = tables.first_live[group]
            visible = self._first_visible(group, position)
            if visible > first:
                for index in range(first, visible):
                    if ids[index] != NULL_BLOCK:
                        self.pools[group].release(ids[index])
                        ids[index] = NULL_BLOCK
                tables.first_live[group] = visible
                tables.mark_changed(group, first)

    def _first_visible(self, group: int, position: int) -> int:
        return first_visible_block(position, self.windows[group], self.block_size)

    # --- end ---------------------------------------------------------------------------------------------------------

    def release(self, tables: BlockTables, token_ids: list[int]) -> None:
        """Give up all references, from the end to the beginning (BlockPool says why). The tables are dead."""
        also_found = self.cache.merge(tables, token_ids)
        for pool, ids, found in zip(self.pools, tables.block_ids, also_found, strict=True):
            for index in range(len(ids) - 1, -1, -1):
                if ids[index] != NULL_BLOCK:
                    pool.release(ids[index])
                if index in found:
                    pool.release(found[index])
            ids.clear()
        self.cache.detach(tables)

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that nobody refers to."""
        for group, pool in enumerate(self.pools):
            while pool.num_cached:
                self.cache.evict(group)
