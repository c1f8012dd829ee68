"""The KV cache of one group of layers: [num_blocks, num_layers, (keys, values)], all layers of a block contiguous.

As int8 the codes of a block's layers are followed by their float32 scales, one per token and head: absmax / 127.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.interface import DType, KVCacheSpec
from kernels.reference.arrays import TORCH_DTYPES

_SCALE_BYTES = 4
_LARGEST_CODE = 127


@dataclass(frozen=True, slots=True)
class Part:
    """One layer's keys or values: views of the blocks."""

    data: torch.Tensor  # [num_blocks, block_size, num_kv_heads · D]
    scales: torch.Tensor | None  # float32 [num_blocks, block_size, num_kv_heads]; None = data are the values themselves


@dataclass(frozen=True, slots=True)
class KVCache:
    """`blocks` [num_blocks, elements of a block] and, per layer, its parts in there."""

    spec: KVCacheSpec
    blocks: torch.Tensor
    keys: tuple[Part, ...]
    values: tuple[Part, ...]


def block_bytes(spec: KVCacheSpec) -> int:
    """Bytes that all layers of one block take."""
    num_rows = spec.num_layers * spec.block_size * spec.num_kv_heads
    data = num_rows * (spec.head_dim + spec.value_head_dim) * TORCH_DTYPES[spec.dtype].itemsize
    if spec.dtype is not DType.INT8:
        return data
    return _aligned(data) + 2 * num_rows * _SCALE_BYTES


def new_kv_cache(spec: KVCacheSpec, device: torch.device) -> KVCache:
    """A zeroed cache."""
    dtype = TORCH_DTYPES[spec.dtype]
    blocks = _zeros(spec.num_blocks, block_bytes(spec), device).view(dtype)
    key_elements = spec.block_size * spec.num_kv_heads * spec.head_dim
    value_elements = spec.block_size * spec.num_kv_heads * spec.value_head_dim
    scale_elements = spec.block_size * spec.num_kv_heads
    scales_start = _aligned(spec.num_layers * (key_elements + value_elements)) // _SCALE_BYTES

    def part(layer: int, head_dim: int, offset: int, scale_offset: int) -> Part:
        data = _view(blocks, spec, spec.num_kv_heads * head_dim, layer * (key_elements + value_elements) + offset)
        if spec.dtype is not DType.INT8:
            return Part(data, None)
        scale_offset += scales_start + layer * 2 * scale_elements
        return Part(data, _view(blocks.view(torch.float32), spec, spec.num_kv_heads, scale_offset))

    layers = range(spec.num_layers)
    return KVCache(
        spec,
        blocks,
        keys=tuple(part(layer, spec.head_dim, 0, 0) for layer in layers),
        values=tuple(part(layer, spec.value_head_dim, key_elements, scale_elements) for layer in layers),
    )


def _zeros(rows: int, row_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [rows, row_bytes]. On the host the system gives the memory when it is written to: torch.zeros would write
    all of it now."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((rows, row_bytes), np.uint8))
    return torch.zeros((rows, row_bytes), dtype=torch.uint8, device=device)


def _view(blocks: torch.Tensor, spec: KVCacheSpec, width: int, offset: int) -> torch.Tensor:
    """[num_blocks, block_size, width] from `offset` elements into each block."""
    return blocks.as_strided((spec.num_blocks, spec.block_size, width), (blocks.shape[1], width, 1), offset)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _SCALE_BYTES) * _SCALE_BYTES


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


def store(part: Part, slots: Slots, x: torch.Tensor) -> None:
    """Write x [T, heads, D] to its slots."""
    if slots.tokens is not None:
        x = x.index_select(0, slots.tokens)
    where = (slots.block_ids, slots.offsets)
    if part.scales is None:
        part.data.index_put_(where, x.flatten(1).to(part.data.dtype))
        return
    wide = x.float()
    scales = wide.abs().amax(dim=-1) / _LARGEST_CODE
    # a NaN reaches the scale, and from there whoever reads the slot; its code may be anything
    codes = (wide / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round_().nan_to_num_(0.0)
    part.data.index_put_(where, codes.flatten(1).to(torch.int8))
    part.scales.index_put_(where, scales)


def gather(part: Part, block_ids: torch.Tensor, num_kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """The blocks as dense values [blocks, block_size, num_kv_heads, D]."""
    data = part.data.index_select(0, block_ids)
    heads = data.view(*data.shape[:2], num_kv_heads, data.shape[2] // num_kv_heads)
    if part.scales is None:
        return heads.to(dtype)
    return (heads * part.scales.index_select(0, block_ids)[..., None]).to(dtype)
