"""What the KV manager keeps for one sequence."""

from __future__ import annotations

from engine.core.plan import BlockTableTail
from engine.core.tree_node import Node


class BlockTables:
    """A sequence's blocks, one table per KV group; all tables have the same length.

    Entry i of a table holds the tokens i × block_size …; leading entries of a window group are the null block once
    they have left the window. Written by KVManager and the prefix cache alone.
    """

    __slots__ = (
        "block_ids",
        "changed_from",
        "first_live",
        "forked",
        "namespace",
        "node",
        "num_committed_blocks",
        "unchanged_tails",
    )

    def __init__(self, namespace: int, block_ids: list[list[int]]) -> None:
        self.namespace = namespace
        self.block_ids = block_ids  # [group][block index]
        # [group]: entries from here on are not known to the executor yet
        self.changed_from = [0] * len(block_ids)
        # The tails that say that nothing has changed; None when something has.
        self.unchanged_tails: tuple[BlockTableTail, ...] | None = None
        # [group]: entries before this one are the null block
        self.first_live = [0] * len(block_ids)
        # The last block, partly filled, may be shared with another sequence of a fork.
        self.forked = False
        # Blocks whose tokens have been computed and offered to the prefix cache.
        self.num_committed_blocks = 0
        # The tree node that leads to this sequence's next block. The path to it is made of the tables' own blocks, and
        # is shorter than what is committed where the tree has other blocks for the same tokens.
        self.node: Node | None = None

    def mark_changed(self, group: int, index: int) -> None:
        """The executor doesn't know entry `index` as it is now."""
        self.changed_from[group] = min(self.changed_from[group], index)
        self.unchanged_tails = None

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids[0])


def first_visible_block(position: int, window: int | None, block_size: int) -> int:
    """Index of the first block that a token at `position` can see."""
    if window is None:
        return 0
    return max(0, position - window + 1) // block_size
