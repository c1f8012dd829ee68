"""Paged attention: one call for prefill chunks, decodes and any mixture.

A tile of queries holds all query heads of one KV head, token by token, so that keys and values are read once for the
group:   row m of a tile = query token m // group, head m % group of the KV head.

Sequences with one query are cut along their keys into segments of SEGMENT_TOKENS, at absolute positions: many programs
share a long sequence, and how it is cut depends on nothing else in the batch. Each leaves (maximum, total, sums) of its
segment; a second kernel puts them together. Every other sequence is cut along its queries; a program walks all keys
that its tile may see. With `by_segments` it walks them in the same segments and puts them together in the same way.

The online softmax works with exponents of two, and its running maximum is rounded up to a whole number: all rescaling
is by powers of two, hence exact, and sums come out the same whichever maximum was known when (but for underflow). Only
the order of additions counts, and that is fixed by position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.interface import AttentionSpec
from kernels.reference.kv_cache import KVCache
from kernels.triton.attention_kernels import decode_kernel, prefill_kernel, reduce_kernel
from kernels.triton.device import power_of_two_at_least

SEGMENT_TOKENS = 256  # a multiple of every key tile
_MAX_PARTIAL_BYTES = 256 << 20  # of the segments' results that exist at a time


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Rows of a prefill's tile, keys of a tile, and how they are run."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _tiles(head_width: int, element_bytes: int, by_segments: bool) -> _Tiles:
    """What fits in Hopper's shared memory (227 KiB) and, with two sets of sums when by_segments, in its registers.
    `head_width` is padded to a power of two."""
    if element_bytes == 4:  # no tensor cores: whole rows in registers
        return _Tiles(16, 16, 8, 1)
    if head_width <= 64:
        return _Tiles(64, 64, 4, 3) if by_segments else _Tiles(128, 64, 8, 3)
    if head_width <= 128:
        return _Tiles(64 if by_segments else 128, 64, 8, 3)
    return _Tiles(32 if by_segments else 64, 32, 8, 2)


def paged_attention(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    spec: AttentionSpec,
    out: torch.Tensor,
    by_segments: bool,
) -> None:
    """As KernelSet.paged_attention. As many tokens as sequences means: each has one, or none (padding of a batch of
    decodes). `by_segments`: prefills add up as decodes do, which costs them registers."""
    num_tokens, num_seqs = q.shape[0], seq_lens.shape[0]
    if num_tokens == 0 or num_seqs == 0:
        return
    shape, place, rows = _shape(q, cache, layer, spec), _place(cache, layer), cache.layers[layer].rows
    strides = (block_tables.stride(0), rows.stride(0), place.scale_block_stride, rows.stride(1))
    numbers = (*strides, place.scale_token_stride, spec.scale, spec.soft_cap or 1.0)
    tables = (place.keys, place.values, place.key_scales, place.value_scales, block_tables, query_start_loc, seq_lens)
    group, num_kv_heads = shape["GROUP"], cache.spec.num_kv_heads
    tiles = _tiles(max(shape["HEAD_WIDTH"], shape["VALUE_WIDTH"]), q.element_size(), by_segments)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    segment_tiles = SEGMENT_TOKENS // tiles.keys
    if num_tokens != num_seqs:
        tile_rows = max(tiles.rows, power_of_two_at_least(group))
        num_tiles = num_tokens // (tile_rows // group) + num_seqs
        prefill_kernel[(num_tiles, num_kv_heads)](
            q, out, *tables, num_seqs, q.stride(0), q.stride(1), out.stride(0), out.stride(1), *numbers,
            **shape, ROWS=tile_rows, KEYS=tiles.keys, SEGMENT_TILES=segment_tiles if by_segments else 0, **options,
        )  # fmt: skip
    num_segments = _num_segments(block_tables.shape[1] * cache.spec.block_size, spec.window)
    num_heads, value_dim = out.shape[1:]
    seq_bytes = num_heads * num_segments * (value_dim + 2) * 4
    seqs_at_once = min(num_seqs, max(1, _MAX_PARTIAL_BYTES // seq_bytes))
    sums = torch.empty((seqs_at_once, num_heads, num_segments, value_dim), dtype=torch.float32, device=q.device)
    statistics = torch.empty((2, seqs_at_once, num_heads, num_segments), dtype=torch.float32, device=q.device)
    for first in range(0, num_seqs, seqs_at_once):
        count = min(seqs_at_once, num_seqs - first)
        decode_kernel[(num_segments, num_kv_heads, count)](
            q, sums, statistics, *tables, first, q.stride(0), q.stride(1), *numbers,
            **shape, ROWS=max(16, power_of_two_at_least(group)), KEYS=tiles.keys, SEGMENT_TILES=segment_tiles,
            num_warps=8 if q.element_size() == 4 else 4, num_stages=tiles.num_stages,
        )  # fmt: skip
        reduce_kernel[(num_heads, count)](
            sums, statistics, out, query_start_loc, seq_lens, first, num_segments, out.stride(0), out.stride(1),
            shape["VALUE_DIM"], shape["VALUE_WIDTH"], shape["WINDOW"], SEGMENT_TOKENS, num_warps=1,
        )  # fmt: skip


def _num_segments(max_length: int, window: int | None) -> int:
    """The most that a sequence of the batch can touch."""
    segments = -(-max_length // SEGMENT_TOKENS)
    return segments if window is None else min(segments, (window - 1) // SEGMENT_TOKENS + 2)


def _shape(q: torch.Tensor, cache: KVCache, layer: int, spec: AttentionSpec) -> dict[str, int]:
    """The constants that both kernels are compiled for."""
    head_dim, value_dim = cache.spec.head_dim, cache.spec.value_head_dim
    return {
        "GROUP": q.shape[1] // cache.spec.num_kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "HEAD_WIDTH": max(16, power_of_two_at_least(head_dim)),
        "VALUE_WIDTH": max(16, power_of_two_at_least(value_dim)),
        "BLOCK_SIZE": cache.spec.block_size,
        "WINDOW": spec.window or 0,
        "SOFT_CAP": spec.soft_cap is not None,
        "QUANTIZED": cache.layers[layer].scales is not None,
    }


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a layer's keys, values and scales begin; without scales the latter are not read."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor
    scale_block_stride: int
    scale_token_stride: int


def _place(cache: KVCache, layer: int) -> _Place:
    rows, scales = cache.layers[layer].rows, cache.layers[layer].scales
    keys, values = rows, rows[:, :, cache.spec.num_kv_heads * cache.spec.head_dim :]
    if scales is None:
        return _Place(keys, values, rows, rows, 0, 0)
    value_scales = scales[:, :, cache.spec.num_kv_heads :]
    return _Place(keys, values, scales, value_scales, scales.stride(0), scales.stride(1))
