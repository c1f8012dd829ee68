"""What the KV manager asks of a prefix cache, and the cache that remembers nothing."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from engine.core.block_tables import BlockTables
from engine.core.tree_node import Node
from engine.errors import EngineError
from engine.types import CacheBranch


class PrefixMatch(NamedTuple):
    """The cached blocks of a prefix; valid until the cache changes."""

    num_blocks: int
    block_ids: list[list[int]]  # [group][num_blocks]; the null block where a window group needs none
    node: Node | None  # holds the last of them; None if there are none


class PrefixCache(Protocol):
    """What the KV manager asks of a prefix cache. Blocks that enter or leave it do so in the pools."""

    enabled: bool
    num_evicted_blocks: int  # since the start

    def match(self, namespace: int, token_ids: list[int], max_blocks: int) -> PrefixMatch:
        """The longest usable prefix of at most max_blocks (≤ the whole blocks of token_ids). Changes nothing."""

    def attach(self, tables: BlockTables, match: PrefixMatch) -> None:
        """Put new tables at the end of the match, whose blocks they have already acquired."""

    def attach_fork(self, tables: BlockTables, parent: BlockTables) -> None:
        """Put new tables where their parent stands, whose blocks they have already acquired."""

    def insert(self, tables: BlockTables, token_ids: list[int], num_blocks: int) -> None:
        """Add the first num_blocks blocks of the tables, up to the first that it has already in another block."""

    def merge(self, tables: BlockTables, token_ids: list[int]) -> list[dict[int, int]]:
        """Before tables are released: add all their committed blocks that it lacks.

        Returns, per group, block index → the block found instead of the tables' own, acquired: the caller releases it
        together with theirs.
        """

    def detach(self, tables: BlockTables) -> None:
        """Forget tables, whose blocks have been released."""

    def largest_branches(self, max_branches: int) -> tuple[CacheBranch, ...]:
        """For people to look at; see engine.core.branches."""

    def next_evicted(self, group: int) -> Node:
        """Where evict() would take it from. Raises as evict() does."""

    def evict(self, group: int) -> None:
        """Free the oldest cached block of the group, which must have one."""


class NoPrefixCache:
    """Remembers nothing."""

    enabled = False

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self.num_evicted_blocks = 0

    def match(self, namespace: int, token_ids: list[int], max_blocks: int) -> PrefixMatch:
        return PrefixMatch(0, [[] for _ in range(self._num_groups)], None)

    def attach(self, tables: BlockTables, match: PrefixMatch) -> None:
        """Nothing to do."""

    def attach_fork(self, tables: BlockTables, parent: BlockTables) -> None:
        """Nothing to do."""

    def insert(self, tables: BlockTables, token_ids: list[int], num_blocks: int) -> None:
        """Nothing to do."""

    def merge(self, tables: BlockTables, token_ids: list[int]) -> list[dict[int, int]]:
        return [{} for _ in range(self._num_groups)]

    def detach(self, tables: BlockTables) -> None:
        """Nothing to do."""

    def largest_branches(self, max_branches: int) -> tuple[CacheBranch, ...]:
        return ()

    def next_evicted(self, group: int) -> Node:
        raise EngineError("there is no cache to evict from")

    def evict(self, group: int) -> None:
        raise EngineError("there is no cache to evict from")
