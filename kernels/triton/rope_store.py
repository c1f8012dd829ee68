"""Rotation and the write into the KV cache in one pass over q, k and v."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.interface import DType, RopeSpec
from kernels.reference.kv_cache import KVCache
from kernels.triton.device import narrow, power_of_two_at_least

_TILE = 2048  # elements that a program works on at a time, about

_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it leaves no room for a fraction
_TINY = tl.constexpr(1.1754943508222875e-38)  # float32's smallest normal number
_FLOAT8_MAX = tl.constexpr(448.0)


@triton.jit
def _largest(x: tl.tensor) -> tl.tensor:
    """max |x| along the last axis; NaN if there is one, which a maximum alone passes over."""
    poison = tl.sum(tl.where(x == x, 0.0, x), axis=1)
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1) + poison


@triton.jit
def _larger(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """The larger one; NaN if either is."""
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def _store(places: tl.tensor, x: tl.tensor, scale: tl.tensor, inside: tl.tensor, STORED: tl.constexpr) -> None:
    """x as codes (rounded to nearest even; of a NaN: 0), as float8 (largest numbers for all beyond), or as it is."""
    if STORED == "codes":
        quotient = tl.div_rn(x, tl.maximum(tl.where(scale == scale, scale, 1.0), _TINY)[:, None])
        codes = (quotient + _ROUND) - _ROUND
        tl.store(places, tl.where(codes == codes, codes, 0.0).to(tl.int8), mask=inside)
    else:
        if STORED == "float8":
            x = tl.where(x > _FLOAT8_MAX, _FLOAT8_MAX, tl.where(x < -_FLOAT8_MAX, -_FLOAT8_MAX, x))
        tl.store(places, narrow(x, places.dtype.element_ty), mask=inside)


@triton.jit
def rope_and_store_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    positions: tl.tensor,  # int32
    cos_sin: tl.tensor,  # float32 [positions, ROTARY]; unused without ROTARY
    slot_mapping: tl.tensor,  # int64
    keys: tl.tensor,  # of this layer in block 0
    values: tl.tensor,
    key_scales: tl.tensor,  # float32; unused unless STORED is "codes"
    value_scales: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_stride: tl.tensor,
    v_head_stride: tl.tensor,
    cos_sin_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    scale_token_stride: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY: tl.constexpr,  # 0 = no rotation
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STORED: tl.constexpr,
    HEADS: tl.constexpr,  # of a tile
    HALF_WIDTH: tl.constexpr,  # ROTARY / 2 and the other widths, padded to powers of two
    REST_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    Q_TILES: tl.constexpr,
) -> None:
    """HEADS heads of one token. Grid: (tokens, Q_TILES of query heads, then tiles of KV heads)."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_query = tile < Q_TILES
    base, stride, head_stride, num_heads = k, k_stride, k_head_stride, KV_HEADS
    if is_query:
        base, stride, head_stride, num_heads = q, q_stride, q_head_stride, Q_HEADS
    heads = tl.where(is_query, tile, tile - Q_TILES) * HEADS + tl.arange(0, HEADS)
    real = (heads < num_heads)[:, None]
    sources = base + token * stride + heads[:, None] * head_stride
    largest = tl.zeros([HEADS], tl.float32)
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        pair = tl.arange(0, HALF_WIDTH)
        first_dim, second_dim = pair, pair + HALF
        if INTERLEAVED:
            first_dim, second_dim = 2 * pair, 2 * pair + 1
        inside = real & (pair < HALF)[None, :]
        angles = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride + pair
        cos = tl.load(angles, mask=pair < HALF, other=1.0)[None, :]
        sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0)[None, :]
        a = tl.load(sources + first_dim[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(sources + second_dim[None, :], mask=inside, other=0.0).to(tl.float32)
        first = narrow(a * cos - b * sin, q.dtype.element_ty)
        second = narrow(b * cos + a * sin, q.dtype.element_ty)
        tl.store(sources + first_dim[None, :], first, mask=inside)
        tl.store(sources + second_dim[None, :], second, mask=inside)
        first, second = first.to(tl.float32), second.to(tl.float32)
        largest = _larger(_largest(first), _largest(second))
    slot = tl.load(slot_mapping + token)
    if is_query | (slot < 0):
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    row = block * block_stride + offset * token_stride
    scale_row = block * scale_block_stride + offset * scale_token_stride
    targets = keys + row + heads[:, None] * HEAD_DIM
    rest_dim = ROTARY + tl.arange(0, REST_WIDTH)
    rest_inside = real & (rest_dim < HEAD_DIM)[None, :]
    scale = largest
    if ROTARY < HEAD_DIM:
        rest = tl.load(sources + rest_dim[None, :], mask=rest_inside, other=0.0).to(tl.float32)
        largest = _larger(largest, _largest(rest))
    if STORED == "codes":
        scale = tl.div_rn(largest, tl.full([HEADS], 127.0, tl.float32))
        tl.store(key_scales + scale_row + heads, scale, mask=heads < KV_HEADS)
    if ROTARY > 0:
        _store(targets + first_dim[None, :], first, scale, inside, STORED)
        _store(targets + second_dim[None, :], second, scale, inside, STORED)
    if ROTARY < HEAD_DIM:
        _store(targets + rest_dim[None, :], rest, scale, rest_inside, STORED)
    value_dim = tl.arange(0, VALUE_WIDTH)
    value_inside = real & (value_dim < VALUE_DIM)[None, :]
    value_sources = v + token * v_stride + heads[:, None] * v_head_stride + value_dim[None, :]
    value = tl.load(value_sources, mask=value_inside, other=0.0).to(tl.float32)
    if STORED == "codes":
        scale = tl.div_rn(_largest(value), tl.full([HEADS], 127.0, tl.float32))
        tl.store(value_scales + scale_row + heads, scale, mask=heads < KV_HEADS)
    value_targets = values + row + heads[:, None] * VALUE_DIM + value_dim[None, :]
    _store(value_targets, value, scale, value_inside, STORED)


def rope_and_store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    rope: RopeSpec | None,
    cache: KVCache,
    layer: int,
    slot_mapping: torch.Tensor,
) -> None:
    """As KernelSet.rope_and_store_kv."""
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens == 0:
        return
    spec, rows, scales = cache.spec, cache.layers[layer].rows, cache.layers[layer].scales
    rotary = 0 if cos_sin is None or rope is None else rope.rotary_dim
    heads = _heads_of_a_tile(max(head_dim, spec.value_head_dim), max(num_heads, spec.num_kv_heads))
    q_tiles = triton.cdiv(num_heads, heads) if rotary else 0  # without rotation queries stay as they are
    rope_and_store_kernel[(num_tokens, q_tiles + triton.cdiv(spec.num_kv_heads, heads))](
        q,
        k,
        v,
        positions,
        positions if cos_sin is None else cos_sin,
        slot_mapping,
        rows,
        rows[:, :, spec.num_kv_heads * head_dim :],
        rows if scales is None else scales,
        rows if scales is None else scales[:, :, spec.num_kv_heads :],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        0 if cos_sin is None else cos_sin.stride(0),
        rows.stride(0),
        rows.stride(1),
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.stride(1),
        Q_HEADS=num_heads,
        KV_HEADS=spec.num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=spec.value_head_dim,
        ROTARY=rotary,
        INTERLEAVED=rope is not None and rope.interleaved,
        BLOCK_SIZE=spec.block_size,
        STORED={DType.INT8: "codes"}.get(spec.dtype, "plain"),
        HEADS=heads,
        HALF_WIDTH=power_of_two_at_least(max(1, rotary // 2)),
        REST_WIDTH=power_of_two_at_least(max(1, head_dim - rotary)),
        VALUE_WIDTH=power_of_two_at_least(spec.value_head_dim),
        Q_TILES=q_tiles,
        num_warps=4,
    )


def _heads_of_a_tile(head_dim: int, num_heads: int) -> int:
    return min(power_of_two_at_least(num_heads), max(1, _TILE // power_of_two_at_least(head_dim)))
