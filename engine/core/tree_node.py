"""A node of the prefix cache's tree."""

from __future__ import annotations


class Node:
    """One edge and what hangs below it. Changed by RadixCache alone."""

    __slots__ = ("block_ids", "children", "depth", "namespace", "num_kept", "num_sequences", "parent", "tokens")

    def __init__(
        self, namespace: int, parent: Node | None, depth: int, tokens: list[int], block_ids: list[list[int]]
    ) -> None:
        self.namespace = namespace
        self.parent = parent  # None: a root, whose edge is empty
        self.depth = depth  # blocks between the root and this edge
        self.tokens = tokens  # [num_blocks × block_size]
        self.block_ids = block_ids  # [group][num_blocks]
        self.children: dict[tuple[int, ...], Node] = {}  # by the tokens of their first block
        self.num_sequences = 0  # live sequences whose committed blocks end here
        self.num_kept = 0  # blocks of the path to its end that a second tier has been sent; the tier's own

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids[0])

    @property
    def end(self) -> int:
        """Blocks between the root and the end of this edge."""
        return self.depth + len(self.block_ids[0])

    def path(self) -> tuple[list[int], list[list[int]]]:
        """Tokens and block ids [group] from the root to the end of this edge."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        groups = range(len(self.block_ids))
        token_ids = [token_id for node in nodes for token_id in node.tokens]
        return token_ids, [[block_id for node in nodes for block_id in node.block_ids[group]] for group in groups]
