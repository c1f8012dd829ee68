"""The kernels of paged attention; attention.py says how they work together."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.device import LOG2_E, dot, narrow, operand, power_of_two, tanh


@triton.jit
def _attend(
    q: tl.tensor,  # [rows, D]
    query_positions: tl.tensor,  # [rows]; −1: the row has no query
    first_tile: tl.tensor,  # keys of the walk, in tiles
    end_tile: tl.tensor,
    first_key: tl.tensor,  # nothing before is visible to any row
    end_key: tl.tensor,  # nothing from here on is
    table: tl.tensor,  # int32: the sequence's block ids
    keys: tl.tensor,  # of this layer and KV head, in block 0
    values: tl.tensor,
    key_scales: tl.tensor,  # float32; unused without QUANTIZED
    value_scales: tl.tensor,
    block_stride: tl.tensor,  # in elements of the cache
    scale_block_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_token_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    SOFT_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
) -> tl.tensor:
    """(maximum [rows], total [rows], sums [rows, Dv]) of softmax weights 2^(score − maximum); −inf, 0, 0 if a row saw
    nothing."""
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    dims = tl.arange(0, HEAD_WIDTH)
    value_dims = tl.arange(0, VALUE_WIDTH)
    for tile in range(first_tile, end_tile):
        positions = tile * KEYS + tl.arange(0, KEYS)
        # what nobody wrote may hold a NaN, which no weight of zero would stop: it is not even read
        written = (positions >= first_key) & (positions < end_key)
        block_ids = tl.load(table + positions // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        offsets = positions % BLOCK_SIZE
        rows = block_ids * block_stride + offsets * token_stride
        k = tl.load(keys + rows[None, :] + dims[:, None], mask=written[None, :] & (dims[:, None] < HEAD_DIM), other=0.0)
        scores = dot(q, operand(k, q.dtype), tl.zeros([ROWS, KEYS], tl.float32)) * scale
        if QUANTIZED:
            scale_rows = block_ids * scale_block_stride + offsets * scale_token_stride
            scores *= tl.load(key_scales + scale_rows, mask=written, other=0.0)[None, :]
        if SOFT_CAP:
            scores = soft_cap * tanh(scores / soft_cap)
        visible = written[None, :] & (positions[None, :] <= query_positions[:, None])
        if WINDOW > 0:
            visible &= positions[None, :] > query_positions[:, None] - WINDOW
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        risen = tl.maximum(maximum, tl.ceil(tl.max(scores, axis=1)))
        reference = tl.where(risen == float("-inf"), 0.0, risen)  # nothing seen yet: −inf − −inf would be a NaN
        weights = tl.exp2(scores - reference[:, None])
        shrink = power_of_two(maximum - reference)
        total = total * shrink + tl.sum(weights, axis=1)
        if QUANTIZED:
            weights *= tl.load(value_scales + scale_rows, mask=written, other=0.0)[None, :]
        v = tl.load(
            values + rows[:, None] + value_dims[None, :],
            mask=written[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        sums = dot(narrow(weights, q.dtype), operand(v, q.dtype), sums * shrink[:, None])
        maximum = risen
    return maximum, total, sums


@triton.jit
def _merge(
    maximum: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    other_maximum: tl.tensor,
    other_total: tl.tensor,
    other_sums: tl.tensor,
) -> tl.tensor:
    """Two results of _attend as one. The second may hold nothing."""
    risen = tl.maximum(maximum, other_maximum)
    reference = tl.where(risen == float("-inf"), 0.0, risen)
    shrink, other_shrink = power_of_two(maximum - reference), power_of_two(other_maximum - reference)
    total = total * shrink + other_total * other_shrink
    return risen, total, sums * shrink[:, None] + other_sums * other_shrink[:, None]


@triton.jit
def prefill_kernel(
    q: tl.tensor,
    out: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    block_tables: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    num_seqs: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_token_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SEGMENT_TILES: tl.constexpr,  # 0 = one walk over all keys
) -> None:
    """One tile of queries of one sequence; sequences with one query are left out. Grid: (tiles, KV heads).

    Sequence s has the tiles from query_start_loc[s] // TOKENS + s on: enough for it, and known without counting.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    program, kv_head = tl.program_id(0), tl.program_id(1)
    low, high = tl.zeros([], tl.int32), num_seqs  # the last sequence whose tiles begin at or before this one
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // TOKENS + middle <= program:
            low = middle
        else:
            high = middle
    start, end = tl.load(query_start_loc + low), tl.load(query_start_loc + low + 1)
    first_token = start + (program - start // TOKENS - low) * TOKENS
    if (end - start == 1) | (first_token >= end):
        return
    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < TOKENS * GROUP) & (token < end)
    before = tl.load(seq_lens + low) - end  # position = token + before
    dims, value_dims = tl.arange(0, HEAD_WIDTH), tl.arange(0, VALUE_WIDTH)
    query_rows = token.to(tl.int64) * q_token_stride + head * q_head_stride
    tile = tl.load(q + query_rows[:, None] + dims[None, :], mask=real[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    positions = tl.where(real, token + before, -1)
    end_key = tl.minimum(first_token + TOKENS, end) + before
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_token + before - WINDOW + 1, 0)
    table = block_tables + low.to(tl.int64) * table_stride
    keys += kv_head * HEAD_DIM
    values += kv_head * VALUE_DIM
    key_scales += kv_head
    value_scales += kv_head
    first_tile, end_tile = first_key // KEYS, tl.cdiv(end_key, KEYS)
    walk_end = end_tile
    if SEGMENT_TILES > 0:
        walk_end = tl.minimum(end_tile, (first_tile // SEGMENT_TILES + 1) * SEGMENT_TILES)
    maximum, total, sums = _attend(
        tile, positions, first_tile, walk_end, first_key, end_key, table, keys, values, key_scales, value_scales,
        block_stride, scale_block_stride, token_stride, scale_token_stride, scale, soft_cap,
        HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, BLOCK_SIZE, ROWS, KEYS, WINDOW, SOFT_CAP, QUANTIZED,
    )  # fmt: skip
    if SEGMENT_TILES > 0:
        for segment in range(first_tile // SEGMENT_TILES + 1, tl.cdiv(end_tile, SEGMENT_TILES)):
            segment_end = tl.minimum(end_tile, (segment + 1) * SEGMENT_TILES)
            other_maximum, other_total, other_sums = _attend(
                tile, positions, segment * SEGMENT_TILES, segment_end, first_key, end_key, table, keys, values,
                key_scales, value_scales, block_stride, scale_block_stride, token_stride, scale_token_stride, scale,
                soft_cap, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, BLOCK_SIZE, ROWS, KEYS, WINDOW, SOFT_CAP,
                QUANTIZED,
            )  # fmt: skip
            maximum, total, sums = _merge(maximum, total, sums, other_maximum, other_total, other_sums)
    attended = sums / tl.where(total == 0.0, 1.0, total)[:, None]  # rows without a query have seen nothing
    out_rows = token.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(
        out + out_rows[:, None] + value_dims[None, :],
        narrow(attended, out.dtype.element_ty),
        mask=real[:, None] & (value_dims[None, :] < VALUE_DIM),
    )


@triton.jit
def decode_kernel(
    q: tl.tensor,
    sums_out: tl.tensor,  # float32 [seqs, heads, segments, Dv]
    statistics_out: tl.tensor,  # float32 [2, seqs, heads, segments]: maxima, totals
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    block_tables: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    first_seq: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_token_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SEGMENT_TILES: tl.constexpr,
) -> None:
    """One segment of one sequence with one query; others are left out. Grid: (segments, KV heads, sequences)."""
    program, kv_head, row_out = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_segments, num_heads, num_seqs = tl.num_programs(0), tl.num_programs(1) * GROUP, tl.num_programs(2)
    seq = first_seq + row_out
    token = tl.load(query_start_loc + seq)
    end_key = tl.load(seq_lens + seq)
    if tl.load(query_start_loc + seq + 1) - token != 1:
        return
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(end_key - WINDOW, 0)
    segment = first_key // (SEGMENT_TILES * KEYS) + program
    first_tile = tl.maximum(first_key // KEYS, segment * SEGMENT_TILES)
    end_tile = tl.minimum(tl.cdiv(end_key, KEYS), (segment + 1) * SEGMENT_TILES)
    if first_tile >= end_tile:
        return
    row = tl.arange(0, ROWS)
    real = row < GROUP
    head = kv_head * GROUP + row
    dims, value_dims = tl.arange(0, HEAD_WIDTH), tl.arange(0, VALUE_WIDTH)
    tile = tl.load(
        q + token.to(tl.int64) * q_token_stride + head[:, None] * q_head_stride + dims[None, :],
        mask=real[:, None] & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )
    maximum, total, sums = _attend(
        tile, tl.where(real, end_key - 1, -1), first_tile, end_tile, first_key, end_key,
        block_tables + seq.to(tl.int64) * table_stride, keys + kv_head * HEAD_DIM, values + kv_head * VALUE_DIM,
        key_scales + kv_head, value_scales + kv_head,
        block_stride, scale_block_stride, token_stride, scale_token_stride, scale, soft_cap,
        HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, BLOCK_SIZE, ROWS, KEYS, WINDOW, SOFT_CAP, QUANTIZED,
    )  # fmt: skip
    place = (row_out.to(tl.int64) * num_heads + head) * num_segments + program
    tl.store(statistics_out + place, maximum, mask=real)
    tl.store(statistics_out + num_seqs.to(tl.int64) * num_heads * num_segments + place, total, mask=real)
    tl.store(
        sums_out + place[:, None] * VALUE_DIM + value_dims[None, :],
        sums,
        mask=real[:, None] & (value_dims[None, :] < VALUE_DIM),
    )


@triton.jit
def reduce_kernel(
    sums_in: tl.tensor,  # as decode_kernel leaves them
    statistics_in: tl.tensor,
    out: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    first_seq: tl.tensor,
    num_segments: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENT: tl.constexpr,  # tokens
) -> None:
    """Put a sequence's segments together, in their order. Grid: (heads, sequences)."""
    head, row_in = tl.program_id(0), tl.program_id(1)
    num_heads, num_seqs = tl.num_programs(0), tl.num_programs(1)
    seq = first_seq + row_in
    token = tl.load(query_start_loc + seq)
    length = tl.load(seq_lens + seq)
    if tl.load(query_start_loc + seq + 1) - token != 1:
        return
    first_segment = 0
    if WINDOW > 0:
        first_segment = tl.maximum(length - WINDOW, 0) // SEGMENT
    used = tl.cdiv(length, SEGMENT) - first_segment
    place = (row_in.to(tl.int64) * num_heads + head) * num_segments
    maxima = statistics_in + place
    totals = statistics_in + num_seqs.to(tl.int64) * num_heads * num_segments + place
    one, dims = tl.arange(0, 1), tl.arange(0, VALUE_WIDTH)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, VALUE_WIDTH], tl.float32)
    for segment in range(used):
        other_sums = tl.load(
            sums_in + (place + segment) * VALUE_DIM + one[:, None] + dims[None, :],
            mask=dims[None, :] < VALUE_DIM,
            other=0.0,
        )
        maximum, total, sums = _merge(
            maximum, total, sums, tl.load(maxima + segment + one), tl.load(totals + segment + one), other_sums
        )
    attended = sums / total[:, None]
    target = out + token.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(
        target + one[:, None] + dims[None, :], narrow(attended, out.dtype.element_ty), mask=dims[None, :] < VALUE_DIM
    )
