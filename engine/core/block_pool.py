"""The blocks of one KV group: which are free, who refers to the others.

            allocate                 acquire (fork)
    free ───────────────▶ private ◀────────────────▶ shared
     ▲ ▲                  │  │       release           ▲ │
     │ └──────────────────┘  │ enter_tree              │ │ release (the last one, in the tree)
     │       release         └─────────────────────────┘ │
     │                                       acquire ▲   ▼
     └────────────────────────────────────────────── cached
                       leave_tree (evict)

A block's `ref_count` counts the block tables that name it, not the prefix tree.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from engine.errors import ConfigError, EngineError

NULL_BLOCK = 0  # stands where a table has no block; never handed out


class BlockState(Enum):
    """Where a block stands; every block but the null block is in exactly one state."""

    FREE = "free"
    PRIVATE = "private"  # one reference, not in the tree: its owner may write it
    SHARED = "shared"  # several references, or one and the tree
    CACHED = "cached"  # in the tree alone: evictable


class BlockPool:
    """Owns the ids 1 … num_blocks − 1. Every operation is O(1).

    Cached blocks stand in the order in which their last reference went. Callers release a sequence's blocks from
    the last to the first, so a block always stands before the blocks of the prefix that leads to it: the oldest
    cached block of a full-attention group is the end of a leaf of the tree.
    """

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the null block. Raises ConfigError if no other is left."""
        if num_blocks < 2:
            raise ConfigError(f"a KV group needs at least 1 block beside the null block, not {num_blocks - 1}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks  # [num_blocks]; read-only outside this class
        self.num_private = 0
        self.num_shared = 0
        self._in_tree = bytearray(num_blocks)  # [num_blocks]
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: the block freed last is warm in the caches
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._held: dict[int, None] = {}
        self._freed_while_held: list[int] = []

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be had now, if the tree gives up what nobody refers to."""
        return len(self._free) + len(self._cached)

    def is_in_tree(self, block_id: int) -> bool:
        return self._in_tree[block_id] == 1

    def state(self, block_id: int) -> BlockState:
        refs = self.ref_counts[block_id]
        if refs == 0:
            return BlockState.CACHED if self._in_tree[block_id] else BlockState.FREE
        return BlockState.SHARED if refs > 1 or self._in_tree[block_id] else BlockState.PRIVATE

    def allocate(self) -> int:
        """A free block, now private. Raises EngineError if there is none: the caller evicts first."""
        if not self._free:
            raise EngineError("allocate() from a pool without a free block")
        block_id = self._free.pop()
        self.ref_counts[block_id] = 1
        self.num_private += 1
        return block_id

    def acquire(self, block_id: int) -> None:
        """One more reference to a block that is private, shared or cached."""
        refs = self.ref_counts[block_id]
        if refs == 0:
            if block_id not in self._cached:
                raise EngineError(f"acquire() of the free block {block_id}")
            del self._cached[block_id]
            self.num_shared += 1
        elif refs == 1 and not self._in_tree[block_id]:
            self.num_private -= 1
            self.num_shared += 1
        self.ref_counts[block_id] = refs + 1

    def release(self, block_id: int) -> None:
        """One reference less; a block that nobody refers to is free, or cached if the tree holds it."""
        refs = self.ref_counts[block_id] - 1
        if refs < 0:
            raise EngineError(f"release() of block {block_id}, to which nobody refers")
        self.ref_counts[block_id] = refs
        if self._in_tree[block_id]:
            if refs == 0:
                self.num_shared -= 1
                self._cached[block_id] = None
        elif refs == 0:
            self.num_private -= 1
            (self._freed_while_held if block_id in self._held else self._free).append(block_id)
        elif refs == 1:
            self.num_shared -= 1
            self.num_private += 1

    def enter_tree(self, block_id: int) -> None:
        """The prefix tree holds this block, which somebody refers to, from now on."""
        if self.ref_counts[block_id] == 0 or self._in_tree[block_id]:
            raise EngineError(f"enter_tree() of block {block_id}, which is {self.state(block_id).value}")
        self._in_tree[block_id] = 1
        if self.ref_counts[block_id] == 1:
            self.num_private -= 1
            self.num_shared += 1

    def leave_tree(self, block_id: int) -> None:
        """The prefix tree gives up a cached block: it is free."""
        if block_id not in self._cached:
            raise EngineError(f"leave_tree() of block {block_id}, which is {self.state(block_id).value}")
        del self._cached[block_id]
        self._in_tree[block_id] = 0
        self._free.append(block_id)

    def oldest_cached(self) -> int:
        """The cached block unreferenced for longest. Raises EngineError if there is none."""
        for block_id in self._cached:
            return block_id
        raise EngineError("oldest_cached() of a pool without a cached block")

    def hold(self, block_id: int) -> None:
        """Until end_step(), don't hand this block out again, even if it becomes free."""
        self._held[block_id] = None

    def end_step(self) -> None:
        """Lift all holds."""
        self._held.clear()
        self._free += self._freed_while_held
        self._freed_while_held.clear()

    def free_ids(self) -> list[int]:
        """The free list, the next to be handed out last (for checks)."""
        return [*self._freed_while_held, *self._free]

    def cached_ids(self) -> list[int]:
        """The cached blocks, the next to be evicted first (for checks)."""
        return list(self._cached)
