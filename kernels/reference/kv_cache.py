"""The KV cache of one group of layers: [num_blocks, num_layers, (keys, values)], all layers of a block contiguous."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.interface import KVCacheSpec
from kernels.reference.arrays import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class KVCache:
    """`blocks` [num_blocks, elements of a block] and, per layer, views of its keys and values in there."""

    spec: KVCacheSpec
    blocks: torch.Tensor
    keys: tuple[torch.Tensor, ...]  # per layer [num_blocks, block_size, num_kv_heads · head_dim]
    values: tuple[torch.Tensor, ...]  # per layer [num_blocks, block_size, num_kv_heads · value_head_dim]


def elements_per_block(spec: KVCacheSpec) -> int:
    """Elements that all layers of one block take."""
    return spec.num_layers * spec.block_size * spec.num_kv_heads * (spec.head_dim + spec.value_head_dim)


def new_kv_cache(spec: KVCacheSpec, device: torch.device) -> KVCache:
    """A zeroed cache."""
    block_elements = elements_per_block(spec)
    blocks = torch.zeros((spec.num_blocks, block_elements), dtype=TORCH_DTYPES[spec.dtype], device=device)
    key_width = spec.num_kv_heads * spec.head_dim
    value_width = spec.num_kv_heads * spec.value_head_dim
    layer_elements = block_elements // spec.num_layers

    def view(width: int, offset: int) -> torch.Tensor:
        shape = (spec.num_blocks, spec.block_size, width)
        return torch.as_strided(blocks, shape, (block_elements, width, 1), offset)

    starts = [layer * layer_elements for layer in range(spec.num_layers)]
    return KVCache(
        spec,
        blocks,
        keys=tuple(view(key_width, start) for start in starts),
        values=tuple(view(value_width, start + spec.block_size * key_width) for start in starts),
    )


@dataclass(frozen=True, slots=True)
class Slots:
    """Where a step's tokens are stored. `tokens` picks the real ones; None = all of them."""

    block_ids: torch.Tensor
    offsets: torch.Tensor
    tokens: torch.Tensor | None


def locate_slots(slot_mapping: torch.Tensor, block_size: int) -> Slots:
    """Split slots into block and offset and leave out the padding (−1)."""
    tokens = None
    if bool((slot_mapping < 0).any()):
        tokens = (slot_mapping >= 0).nonzero()[:, 0]
        slot_mapping = slot_mapping.index_select(0, tokens)
    block_ids = slot_mapping.div(block_size, rounding_mode="floor")
    return Slots(block_ids, slot_mapping - block_ids * block_size, tokens)


def store(cache: torch.Tensor, slots: Slots, x: torch.Tensor) -> None:
    """Write x [T, heads, D] to its slots in one layer's keys or values."""
    rows = x.flatten(1)
    if slots.tokens is not None:
        rows = rows.index_select(0, slots.tokens)
    cache.index_put_((slots.block_ids, slots.offsets), rows.to(cache.dtype))
