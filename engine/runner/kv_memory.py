"""How the KV memory is divided among the groups of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.config import ResolvedConfig
from engine.core.plan import KVCapacity, KVGroupCapacity
from engine.models.config import KVGroup
from kernels.interface import DType, KernelSet, KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The division: per group its layers' cache and what a block of it takes."""

    windows: tuple[int | None, ...]
    specs: tuple[KVCacheSpec, ...]
    block_bytes: tuple[int, ...]
    num_host_blocks: int = 0  # of each group, in the host's memory, without the null block

    @property
    def num_usable_blocks(self) -> tuple[int, ...]:
        """Without the null block."""
        return tuple(spec.num_blocks - 1 for spec in self.specs)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that can be kept: what the groups without a window hold, or all groups if there is none."""
        pairs = zip(self.num_usable_blocks, self.windows, strict=True)
        full = [num_blocks for num_blocks, window in pairs if window is None]
        return min(full or self.num_usable_blocks) * self.specs[0].block_size

    @property
    def total_bytes(self) -> int:
        return sum(spec.num_blocks * size for spec, size in zip(self.specs, self.block_bytes, strict=True))

    @property
    def host_specs(self) -> tuple[KVCacheSpec, ...]:
        """Of the caches in the host's memory; () if there are none."""
        if self.num_host_blocks == 0:
            return ()
        return tuple(replace(spec, num_blocks=self.num_host_blocks + 1) for spec in self.specs)

    @property
    def host_bytes(self) -> int:
        return self.num_host_blocks * sum(self.block_bytes)

    def capacity(self, copy_costs: Sequence[int]) -> KVCapacity:
        """As the scheduler takes it. copy_costs [group] mean something where there are host blocks."""
        num_host_blocks = self.num_host_blocks + 1 if self.num_host_blocks else 0
        rows = zip(self.specs, self.windows, copy_costs, strict=True)
        groups = tuple(KVGroupCapacity(spec.num_blocks, window, num_host_blocks, cost) for spec, window, cost in rows)
        return KVCapacity(self.specs[0].block_size, groups)


def plan_kv_memory(resolved: ResolvedConfig, groups: Sequence[KVGroup], kernels: KernelSet) -> KVMemory:
    """Divide resolved.kv_cache_bytes among the groups; keys and values are kept in
    resolved.kv_cache_dtype. The groups get equally many of the host's blocks."""
    specs = [
        KVCacheSpec(
            num_layers=len(group.layers),
            num_blocks=0,
            block_size=resolved.block_size,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            value_head_dim=group.head_dim,
            dtype=DType(resolved.kv_cache_dtype),
        )
        for group in groups
    ]
    block_bytes = tuple(kernels.kv_block_bytes(spec) for spec in specs)
    blocks = divide_kv_memory(
        resolved.kv_cache_bytes,
        [GroupDemand(size, group.window) for size, group in zip(block_bytes, groups, strict=True)],
        resolved.block_size,
        resolved.max_num_seqs,
        resolved.max_num_batched_tokens,
    )
    sized = tuple(replace(spec, num_blocks=count + 1) for spec, count in zip(specs, blocks, strict=True))
    num_host_blocks = resolved.host_kv_bytes // sum(block_bytes)
    return KVMemory(tuple(group.window for group in groups), sized, block_bytes, num_host_blocks)


@dataclass(frozen=True, slots=True)
class GroupDemand:
    """What a block of one group costs, and how far its layers see."""

    block_bytes: int
    window: int | None


def divide_kv_memory(
    kv_cache_bytes: int,
    groups: Sequence[GroupDemand],
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> tuple[int, ...]:
    """Usable blocks per group; a null block comes on top.

    All groups get equally many, as short sequences need it, but a window group beside one that keeps everything gets
    no more than all sequences at once can use: per sequence the window, and the tokens of a step. What this saves
    goes to the others.
    """
    has_full = any(group.window is None for group in groups)
    step_blocks = -(-max_num_batched_tokens // block_size)
    limits = [
        max_num_seqs * (-(-group.window // block_size) + 1) + step_blocks
        if group.window is not None and has_full
        else None
        for group in groups
    ]
    blocks = [0] * len(groups)
    open_groups = list(range(len(groups)))
    left = kv_cache_bytes
    while open_groups:
        equal = left // sum(groups[index].block_bytes for index in open_groups)
        limited = [index for index in open_groups if (limit := limits[index]) is not None and limit < equal]
        if not limited:
            for index in open_groups:
                blocks[index] = equal
            break
        for index in limited:
            blocks[index] = limits[index] or 0
            left -= blocks[index] * groups[index].block_bytes
        open_groups = [index for index in open_groups if index not in limited]
    return tuple(blocks)
