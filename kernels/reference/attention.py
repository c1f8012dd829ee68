"""Paged attention: what a step attends to (planned once), then gather and attend, layer by layer.

Keys and values are gathered from their blocks into dense arrays. Decodes of similar lengths run as one call; the
padding this takes is bounded by _MAX_PADDING and masked. Every other sequence runs alone, in tiles of queries, so that
masks and scores are linear in its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kernels.interface import AttentionSpec
from kernels.reference.kv_cache import KVCache, gather

_QUERY_TILE = 256  # queries of a prefill that share one mask
_MAX_PADDING = 1.25  # gathered tokens ÷ real tokens within a group of decodes …
_FREE_PADDING_BLOCKS = 16  # … where so many blocks of padding are cheaper than another call
_MAX_GROUP_BLOCKS = 4096  # bounds the dense copy that a group of decodes needs


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each. Of the gathered positions the first L = num_positions are looked at: as many as
    the longest sequence has."""

    rows: torch.Tensor | slice  # [S] which tokens
    num_seqs: int
    block_ids: torch.Tensor  # int32 [S · blocks per sequence]
    num_positions: int
    mask: torch.Tensor | None  # additive [S, 1, 1, L]; None = everything is visible
    unwritten: torch.Tensor | None  # of the S · blocks · block_size gathered ones, those to be zeroed


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Consecutive queries of one sequence and the gathered keys they may see."""

    first_query: int  # token of the step
    num_queries: int
    first_key: int  # in the gathered keys
    last_key: int
    mask: torch.Tensor | None  # additive [queries, keys]
    is_causal: bool  # as many keys as queries: the library's own mask


@dataclass(frozen=True, slots=True)
class Prefill:
    """One sequence with several queries."""

    block_ids: torch.Tensor  # int32
    tiles: tuple[PrefillTile, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All work of one paged_attention call; equal for all layers of a group with the same window."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[Prefill, ...]


def plan_attention(
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Read the index arrays once and lay out the step. `dtype` is the masks'."""
    tables = block_tables.cpu().numpy()
    starts: list[int] = query_start_loc.tolist()
    lengths: list[int] = seq_lens.tolist()
    device = block_tables.device
    decodes: list[tuple[int, int, int]] = []  # (sequence, first visible block, end block)
    prefills: list[Prefill] = []
    for seq, length in enumerate(lengths):
        num_queries = starts[seq + 1] - starts[seq]
        first_visible = 0 if window is None else max(0, length - num_queries + 1 - window)
        first_block, end_block = first_visible // block_size, -(-length // block_size)
        if num_queries == 1:
            decodes.append((seq, first_block, end_block))
        elif num_queries > 1:
            block_ids = torch.from_numpy(tables[seq, first_block:end_block].copy()).to(device)
            origin = first_block * block_size
            tiles = tuple(_tiles(starts[seq], num_queries, length, origin, window, dtype, device))
            prefills.append(Prefill(block_ids, tiles))
    groups = tuple(
        _decode_group(group, tables, starts, lengths, block_size, window, dtype, device)
        for group in _similar_lengths(decodes)
    )
    return AttentionPlan(groups, tuple(prefills))


def _similar_lengths(decodes: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Split into groups whose padding to the longest is small. Already equal lengths keep their order."""
    decodes = sorted(decodes, key=lambda decode: decode[2] - decode[1])
    group: list[tuple[int, int, int]] = []
    real_blocks = 0
    for decode in decodes:
        num_blocks = decode[2] - decode[1]
        padded, real = (len(group) + 1) * num_blocks, real_blocks + num_blocks
        if group and (padded > _MAX_PADDING * real + _FREE_PADDING_BLOCKS or padded > _MAX_GROUP_BLOCKS):
            yield group
            group, real = [], num_blocks
        group.append(decode)
        real_blocks = real
    if group:
        yield group


def _decode_group(
    group: Sequence[tuple[int, int, int]],
    tables: npt.NDArray[np.int32],
    starts: list[int],
    lengths: list[int],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeGroup:
    num_blocks = max(end - first for _, first, end in group)
    block_ids = np.zeros((len(group), num_blocks), np.int32)  # the null block where a sequence is shorter
    visible_from = np.zeros(len(group), np.int64)  # in gathered positions
    visible_to = np.zeros(len(group), np.int64)
    for row, (seq, first, end) in enumerate(group):
        block_ids[row, : end - first] = tables[seq, first:end]
        visible_to[row] = lengths[seq] - first * block_size
        if window is not None:
            visible_from[row] = max(0, visible_to[row] - window)
    num_positions = int(visible_to.max())
    positions = np.arange(num_positions)
    outside = positions >= visible_to[:, None]
    hidden = outside | (positions < visible_from[:, None])
    mask = unwritten = None
    if hidden.any():
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(torch.from_numpy(hidden).to(device), -torch.inf)[:, None, None, :]
    if outside.any():
        seq_of, position_of = outside.nonzero()
        unwritten = torch.from_numpy(seq_of * num_blocks * block_size + position_of).to(device)
    rows = [starts[seq] for seq, _, _ in group]
    consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
    return DecodeGroup(
        rows=slice(rows[0], rows[0] + len(rows)) if consecutive else torch.tensor(rows, device=device),
        num_seqs=len(group),
        block_ids=torch.from_numpy(block_ids.reshape(-1)).to(device),
        num_positions=num_positions,
        mask=mask,
        unwritten=unwritten,
    )


def _tiles(
    first_token: int,
    num_queries: int,
    length: int,
    origin: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[PrefillTile]:
    """`origin` is the position of the first gathered key. A whole prompt without a window needs no mask of ours."""
    start = length - num_queries  # position of the first query
    if start == origin and (window is None or window >= length):
        yield PrefillTile(first_token, num_queries, 0, num_queries, None, True)
        return
    for first in range(0, num_queries, _QUERY_TILE):
        last = min(num_queries, first + _QUERY_TILE)
        first_key = origin if window is None else max(origin, start + first + 1 - window)
        queries = torch.arange(start + first, start + last, device=device)[:, None]
        keys = torch.arange(first_key, start + last, device=device)[None, :]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        yield PrefillTile(first_token + first, last - first, first_key - origin, start + last - origin, mask, False)


def paged_attention(
    q: torch.Tensor, cache: KVCache, layer: int, plan: AttentionPlan, spec: AttentionSpec, out: torch.Tensor
) -> None:
    """Run a plan over one layer's cache. q [T, heads, D], out [T, heads, Dv]."""
    num_kv_heads = cache.spec.num_kv_heads
    num_tokens, num_heads, head_dim = q.shape
    heads_per_kv_head = num_heads // num_kv_heads
    queries = q.view(num_tokens, num_kv_heads, heads_per_kv_head, head_dim)
    outputs = out.view(num_tokens, num_kv_heads, heads_per_kv_head, out.shape[-1])
    for group in plan.decodes:
        k, v = (
            part.view(group.num_seqs, -1, *part.shape[1:])[:, : group.num_positions].transpose(1, 2)
            for part in gather(cache, layer, group.block_ids, group.unwritten, q.dtype)
        )
        # the query heads of a KV head stand where the library expects query positions: K and V are read once
        outputs[group.rows] = _attend(queries[group.rows], k, v, group.mask, False, spec)
    for prefill in plan.prefills:
        gathered = gather(cache, layer, prefill.block_ids, None, q.dtype)
        for tile in prefill.tiles:
            rows = slice(tile.first_query, tile.first_query + tile.num_queries)
            tile_q = queries[rows].permute(1, 2, 0, 3)  # [kv_heads, heads per KV head, queries, D]
            k, v = (
                part[tile.first_key : tile.last_key].transpose(0, 1)[:, None].expand(-1, heads_per_kv_head, -1, -1)
                for part in gathered
            )
            outputs[rows] = _attend(tile_q, k, v, tile.mask, tile.is_causal, spec).permute(2, 0, 1, 3)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    spec: AttentionSpec,
) -> torch.Tensor:
    """softmax(cap(q · kᵀ · scale) + mask) · v; q [B, G, n, D], k [B, G, L, D], v [B, G, L, Dv]."""
    if spec.soft_cap is None and k.shape[-1] == v.shape[-1]:
        if mask is not None:
            mask = mask.expand(q.shape[0], -1, q.shape[2], -1) if mask.dim() == 4 else mask
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=spec.scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(spec.scale)
    if spec.soft_cap is not None:
        scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    elif mask is not None:
        scores.add_(mask)
    return torch.matmul(torch.softmax(scores, dim=-1).to(v.dtype), v)
