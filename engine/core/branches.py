"""The largest branches of the prefix cache's tree, for people to look at."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count

from engine.core.tree_node import Node
from engine.types import CacheBranch


def largest_branches(roots: Iterable[Node], block_size: int, max_branches: int) -> tuple[CacheBranch, ...]:
    """The edges with the most blocks on and below them, parents before children, each with its parent's place in the
    list. Takes time in proportion to the number of nodes."""
    roots = list(roots)
    sizes = _subtrees(roots)
    found: list[CacheBranch] = []
    arrivals = count()  # among equals the first to come goes first
    heap: list[tuple[int, int, int, Node]] = []

    def offer(nodes: Iterable[Node], parent: int) -> None:
        for node in nodes:
            heapq.heappush(heap, (-sizes[id(node)][0], next(arrivals), parent, node))

    for root in roots:
        offer(root.children.values(), -1)
    while heap and len(found) < max_branches:
        negative_size, _, parent, node = heapq.heappop(heap)
        offer(node.children.values(), len(found))
        found.append(
            CacheBranch(
                parent,
                start_tokens=node.depth * block_size,
                num_tokens=node.num_blocks * block_size,
                subtree_tokens=-negative_size * block_size,
                num_sequences=sizes[id(node)][1],
            )
        )
    return tuple(found)


def _subtrees(roots: Iterable[Node]) -> dict[int, tuple[int, int]]:
    """id of a node → blocks and live sequences on and below its edge."""
    order: list[Node] = []
    stack = list(roots)
    while stack:
        node = stack.pop()
        order.append(node)
        stack += node.children.values()
    sizes: dict[int, tuple[int, int]] = {}
    for node in reversed(order):  # children before parents
        below = [sizes[id(child)] for child in node.children.values()]
        num_blocks = node.num_blocks + sum(blocks for blocks, _ in below)
        sizes[id(node)] = num_blocks, node.num_sequences + sum(sequences for _, sequences in below)
    return sizes
