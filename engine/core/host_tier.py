"""Blocks in the host's memory, behind those of the device.

Two kinds of content leave the device for it, and come back when a sequence that begins with it is admitted:

- a preempted sequence may be *parked*: all it has computed, its partly filled last block too, stays referenced until it
  runs again or ends. Whether that is cheaper than to compute it anew is decided for each by cost.
- before a prefix is evicted from the device, the path that leads to it is *kept*, cached and evictable, the least
  recently used first.

Here the copies are planned. An executor makes those out before those in, and both before anything else of a step, so a
block that leaves the device may have a new owner in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from engine.core.block_pool import NULL_BLOCK
from engine.core.block_tables import BlockTables
from engine.core.kv_manager import KVManager
from engine.core.plan import BlockCopy, KVCapacity, KVGroupCapacity
from engine.core.tree_node import Node
from engine.types import KVGroupStats

PreemptionMode = Literal["auto", "recompute", "swap"]


class Parked(NamedTuple):
    """A preempted sequence's KV in the host's memory."""

    tables: BlockTables  # of the host's blocks
    num_tokens: int


class HostTier:
    """The host's blocks have states, tree and tables of their own: a KVManager whose sequences never run."""

    def __init__(
        self, device: KVManager, capacity: KVCapacity, *, prefix_cache: bool, preemption: PreemptionMode
    ) -> None:
        """From now on evictions of `device` are kept here."""
        groups = tuple([KVGroupCapacity(group.num_host_blocks, group.window) for group in capacity.groups])
        self.kv = KVManager(KVCapacity(capacity.block_size, groups), prefix_cache=prefix_cache, max_step_tokens=1)
        self.num_blocks_out = 0  # since the start
        self.num_blocks_in = 0
        self.num_parked = 0  # sequences whose KV waits here
        self._device = device
        self._copy_costs = [group.copy_cost for group in capacity.groups]
        self._preemption = preemption
        self._out: list[BlockCopy] = []
        self._in: list[BlockCopy] = []
        self._lent: list[tuple[BlockTables, list[int]]] = []  # read by copies planned and not taken yet
        device.before_eviction = self._keep

    # --- device → host -----------------------------------------------------------------------------------------------

    def park(self, tables: BlockTables, token_ids: list[int], num_tokens: int) -> Parked | None:
        """Plan to copy what a sequence has in its tables; None if that isn't wanted, doesn't fit, or costs more than to
        compute num_tokens again."""
        if self._preemption == "recompute" or num_tokens == 0:
            return None
        if self._preemption == "auto":
            known = self.kv.match(tables.namespace, token_ids, num_tokens)
            both_ways = [
                _num_named(ids) + _num_named(ids[known.num_blocks :]) for ids in tables.block_ids
            ]  # all have to come back, but what is here already need not be sent
            if not self._is_cheaper(both_ways, num_tokens):
                return None
        parked = self._copy_out(tables.namespace, token_ids, num_tokens, tables.block_ids)
        if parked is None:
            return None
        self.num_parked += 1
        return Parked(parked, num_tokens)

    def _keep(self, node: Node) -> None:
        """The end of this node is about to be evicted from the device."""
        if node.num_kept >= node.end:
            return
        node.num_kept = node.end
        token_ids, block_ids = node.path()
        room = min([pool.num_available for pool in self.kv.pools])
        num_tokens = min(node.end, room) * self.kv.block_size
        tables = self._copy_out(node.namespace, token_ids, num_tokens, [ids[:room] for ids in block_ids])
        if tables is not None:
            self.kv.release(tables, token_ids)

    def _copy_out(
        self, namespace: int, token_ids: list[int], num_tokens: int, block_ids: list[list[int]]
    ) -> BlockTables | None:
        """Host tables like the device's block_ids [group]; what the host's tree has is not copied again."""
        tables = self.kv.admit(namespace, self.kv.match(namespace, token_ids, num_tokens))
        copies = self.kv.mirror(tables, block_ids)
        if copies is None:
            self.kv.release(tables, token_ids)
            return None
        self._out += copies
        self.num_blocks_out += len(copies)
        self.kv.commit(tables, token_ids, num_tokens)
        return tables

    # --- host → device -----------------------------------------------------------------------------------------------

    def num_cached_blocks(self, namespace: int, token_ids: list[int], max_tokens: int) -> int:
        """How long a prefix of at most max_tokens is here, if it is worth fetching."""
        num_blocks = self.kv.match(namespace, token_ids, max_tokens).num_blocks
        is_worth_it = self._is_cheaper([1] * len(self._copy_costs), self.kv.block_size)
        return num_blocks if is_worth_it else 0

    def bring_back(self, tables: BlockTables, token_ids: list[int], max_tokens: int, parked: Parked | None) -> int:
        """Lengthen device tables, just admitted, by what the host has beyond them: all that was parked, or a cached
        prefix of at most max_tokens. Returns the tokens that they hold then. `parked` is used up."""
        num_tokens = tables.num_blocks * self.kv.block_size
        if parked is not None:
            self.num_parked -= 1
        else:
            if self.num_cached_blocks(tables.namespace, token_ids, max_tokens) <= tables.num_blocks:
                return num_tokens
            match = self.kv.match(tables.namespace, token_ids, max_tokens)
            parked = Parked(self.kv.admit(tables.namespace, match), match.num_blocks * self.kv.block_size)
        copies = self._device.mirror(tables, parked.tables.block_ids)
        if copies is None:
            self.kv.release(parked.tables, token_ids)
            return num_tokens
        self._device.slide(tables, parked.num_tokens)
        self._in += copies
        self.num_blocks_in += len(copies)
        self._lent.append((parked.tables, token_ids))
        return parked.num_tokens

    def drop(self, parked: Parked, token_ids: list[int]) -> None:
        """The sequence will not come back for it."""
        self.num_parked -= 1
        self.kv.release(parked.tables, token_ids)

    # --- the executor's part -----------------------------------------------------------------------------------------

    def take_swaps(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """The copies out and in since the last call, targets distinct; ends the planning of a step."""
        taken = _last_to_each_target(self._out), _last_to_each_target(self._in)
        self._out.clear()
        self._in.clear()
        for tables, token_ids in self._lent:
            self.kv.release(tables, token_ids)
        self._lent.clear()
        return taken

    def reset(self) -> None:
        """Forget all cached prefixes; what is parked stays."""
        self.kv.reset_prefix_cache()

    def stats(self) -> tuple[KVGroupStats, ...]:
        return self.kv.stats()

    def lent_tables(self) -> list[BlockTables]:
        """For checks."""
        return [tables for tables, _ in self._lent]

    def _is_cheaper(self, num_blocks: Sequence[int], num_tokens: int) -> bool:
        """Whether to copy so many blocks of each group costs no more than to compute the tokens."""
        costs = zip(num_blocks, self._copy_costs, strict=True)
        return sum([count * cost for count, cost in costs]) <= 1000 * num_tokens


def _num_named(block_ids: Sequence[int]) -> int:
    return sum([block_id != NULL_BLOCK for block_id in block_ids])


def _last_to_each_target(copies: list[BlockCopy]) -> tuple[BlockCopy, ...]:
    """A block that was given up and taken again within one step gets what came last."""
    return tuple({(copy.group, copy.target): copy for copy in copies}.values())
