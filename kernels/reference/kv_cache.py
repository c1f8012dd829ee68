"""The KV cache of one group of layers: [num_blocks, num_layers, block_size, (keys, values)].

All layers of a block lie contiguous, and a token's keys beside its values. As int8 the codes of a block's layers are
followed by their float32 scales, one per token and head: absmax / 127.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.interface import DType, KVCacheSpec
from kernels.reference.arrays import TORCH_DTYPES, side_by_side

_SCALE_BYTES = 4
_LARGEST_CODE = 127


@dataclass(frozen=True, slots=True)
class Layer:
    """Views of one layer in the blocks. A row is a token's keys of all heads, then its values of all heads."""

    rows: torch.Tensor  # [num_blocks, block_size, num_kv_heads · (head_dim + value_head_dim)]
    scales: torch.Tensor | None  # float32 [num_blocks, block_size, 2 · num_kv_heads]; None = rows hold the values


@dataclass(frozen=True, slots=True)
class KVCache:
    """`blocks` [num_blocks, elements of a block] and the layers in there."""

    spec: KVCacheSpec
    blocks: torch.Tensor
    layers: tuple[Layer, ...]


def block_bytes(spec: KVCacheSpec) -> int:
    """Bytes that all layers of one block take."""
    num_heads = spec.num_layers * spec.block_size * spec.num_kv_heads
    data = num_heads * (spec.head_dim + spec.value_head_dim) * TORCH_DTYPES[spec.dtype].itemsize
    if spec.dtype is not DType.INT8:
        return data
    return _aligned(data) + 2 * num_heads * _SCALE_BYTES


def new_kv_cache(spec: KVCacheSpec, device: torch.device) -> KVCache:
    """A zeroed cache."""
    dtype = TORCH_DTYPES[spec.dtype]
    blocks = _zeros(spec.num_blocks, block_bytes(spec), device).view(dtype)
    width = spec.num_kv_heads * (spec.head_dim + spec.value_head_dim)
    scales_start = _aligned(spec.num_layers * spec.block_size * width) // _SCALE_BYTES

    def layer(index: int) -> Layer:
        rows = _view(blocks, spec, index, width, 0)
        if spec.dtype is not DType.INT8:
            return Layer(rows, None)
        return Layer(rows, _view(blocks.view(torch.float32), spec, index, 2 * spec.num_kv_heads, scales_start))

    return KVCache(spec, blocks, tuple(layer(index) for index in range(spec.num_layers)))


def _zeros(rows: int, row_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [rows, row_bytes]. On the host the system gives the memory when it is written to: torch.zeros would write
    all of it now."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((rows, row_bytes), np.uint8))
    return torch.zeros((rows, row_bytes), dtype=torch.uint8, device=device)


def _view(blocks: torch.Tensor, spec: KVCacheSpec, layer: int, width: int, start: int) -> torch.Tensor:
    """One layer [num_blocks, block_size, width] of those that begin `start` elements into each block."""
    offset = start + layer * spec.block_size * width
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


def store(layer: Layer, slots: Slots, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write k [T, heads, D] and v [T, heads, Dv] to their slots."""
    where = (slots.block_ids, slots.offsets)
    if layer.scales is not None:
        (k, k_scales), (v, v_scales) = quantise(k), quantise(v)
        layer.scales.index_put_(where, _real(torch.cat((k_scales, v_scales), dim=1), slots))
    rows = side_by_side(k, v)
    if rows is None:
        rows = torch.cat((k.flatten(1), v.flatten(1)), dim=1)
    layer.rows.index_put_(where, _real(rows, slots).to(layer.rows.dtype))


def _real(rows: torch.Tensor, slots: Slots) -> torch.Tensor:
    return rows if slots.tokens is None else rows.index_select(0, slots.tokens)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as int8 [T, heads, D] and scales [T, heads], the same bits as the native kernels'. A NaN reaches the
    scale, and from there whoever reads the slot; its code may be anything."""
    wide = x.float()
    top = wide.abs().amax(dim=-1)
    inverse = torch.where(top > 0, _LARGEST_CODE / top, 0.0)
    codes = (wide * inverse[..., None]).round_().nan_to_num_(0.0).clamp_(-_LARGEST_CODE, _LARGEST_CODE)
    return codes.to(torch.int8), top / _LARGEST_CODE


def gather(
    cache: KVCache, layer: int, block_ids: torch.Tensor, unwritten: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks' keys [positions, num_kv_heads, D] and values [positions, num_kv_heads, Dv], in order.

    Positions named by `unwritten` are zeroed: slots that nobody has written since hold what their last owner left, and
    a NaN there would pass through any mask.
    """
    spec, source = cache.spec, cache.layers[layer]
    rows = source.rows.index_select(0, block_ids).flatten(0, 1)
    if unwritten is not None:
        rows.index_fill_(0, unwritten, 0)
    key_width = spec.num_kv_heads * spec.head_dim
    k = rows[:, :key_width].view(-1, spec.num_kv_heads, spec.head_dim)
    v = rows[:, key_width:].view(-1, spec.num_kv_heads, spec.value_head_dim)
    if source.scales is not None:
        scales = source.scales.index_select(0, block_ids).flatten(0, 1)
        if unwritten is not None:
            scales.index_fill_(0, unwritten, 0.0)
        k, v = (part * scale[..., None] for part, scale in zip((k, v), scales.chunk(2, dim=1), strict=True))
    return k.to(dtype), v.to(dtype)
