"""The best token of each row, and the bounds that the filters set: without sorting a vocabulary.

Bounds are found by walking over the few tokens near the best, over the whole row where those do not do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.device import power_of_two_at_least
from kernels.triton.vocabulary import (
    BLOCK,
    CHUNK,
    EXACT,
    LOG_MIN_P,
    NEAR,
    NO_ID,
    NOISE_RANGE,
    TOP_K,
    TOP_P,
    divisor,
    real_number,
    row_best,
    row_sum,
    scaled,
    whole_number,
)


class Rows:
    """The logits of a batch and what the stages so far left of them.

    `edited` may be the logits themselves. Per row and chunk: `best` (the largest z), `token` (the lowest id of those),
    `nan`; `near` and `weight` (see near_kernel). Per row: `lowest`, float64.
    """

    def __init__(self, logits: torch.Tensor, edited: torch.Tensor, numbers: torch.Tensor) -> None:
        self.logits, self.edited, self.numbers = logits, edited, numbers
        self.num_rows, self.size = logits.shape
        self.num_chunks = -(-self.size // CHUNK.value)
        self.chunks = power_of_two_at_least(self.num_chunks)
        self.grid = (self.num_rows, self.num_chunks)
        self.best = self.new(self.grid, torch.float32)
        self.token, self.nan = self.new(self.grid, torch.int32), self.new(self.grid, torch.int32)
        self.near, self.weight = self.new(self.grid, torch.int32), self.new(self.grid, torch.float64)
        self.lowest = self.new((self.num_rows,), torch.float64)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.logits.device)

    def find_best(self) -> None:
        best_kernel[self.grid](
            self.logits, self.edited, self.numbers, self.best, self.token, self.nan,
            self.num_rows, self.size, self.num_chunks, self.logits.stride(0), self.edited.stride(0),
            EDITED=self.edited is not self.logits, **EXACT,
        )  # fmt: skip

    def find_weights(self) -> None:
        near_kernel[self.grid](
            self.edited, self.numbers, self.best, self.near, self.weight,
            self.num_rows, self.size, self.num_chunks, self.edited.stride(0), CHUNKS=self.chunks, **EXACT,
        )  # fmt: skip

    def find_bounds(self, filtered: bool, drawn: bool) -> None:
        """`filtered`: some row has top_k or top_p; `drawn`: the other filters count too."""
        near_z = self.new((self.num_rows, self.size if filtered else 0), torch.float32)
        if filtered:
            self.find_weights()
            collect_kernel[self.grid](
                self.edited, self.numbers, self.best, self.near, near_z,
                self.num_rows, self.size, self.num_chunks, self.edited.stride(0), CHUNKS=self.chunks, **EXACT,
            )  # fmt: skip
        bound_kernel[(self.num_rows,)](
            self.edited, self.numbers, self.best, self.near, self.weight, near_z, self.lowest,
            self.num_rows, self.size, self.num_chunks, self.edited.stride(0),
            FILTERED=filtered, DRAWN=drawn, CHUNKS=self.chunks, **EXACT,
        )  # fmt: skip


@triton.jit
def best_kernel(
    logits: tl.tensor,  # as they came: only they are searched for NaN
    edited: tl.tensor,
    numbers: tl.tensor,
    chunk_best: tl.tensor,  # float32 [R, chunks]
    chunk_token: tl.tensor,  # int32 [R, chunks]: the lowest id of those
    chunk_nan: tl.tensor,  # int32 [R, chunks]
    num_rows: tl.tensor,
    size: tl.tensor,
    num_chunks: tl.tensor,
    logits_stride: tl.tensor,
    edited_stride: tl.tensor,
    EDITED: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = divisor(numbers, row, num_rows)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.full([BLOCK], NO_ID, tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    for start in range(0, CHUNK, BLOCK):
        tokens = chunk * CHUNK + start + tl.arange(0, BLOCK)
        z = scaled(edited + row * edited_stride, tokens, size, temperature)
        raw = z
        if EDITED:
            raw = tl.load(logits + row * logits_stride + tokens, mask=tokens < size, other=0.0)
        nans |= (raw != raw).to(tl.int32)
        better = z > best
        best, best_token = tl.where(better, z, best), tl.where(better, tokens, best_token)
    largest = tl.max(best, axis=0)
    at = row * num_chunks + chunk
    tl.store(chunk_best + at, largest)
    tl.store(chunk_token + at, tl.min(tl.where(best == largest, best_token, NO_ID), axis=0))
    tl.store(chunk_nan + at, tl.max(nans, axis=0))


@triton.jit
def near_kernel(
    edited: tl.tensor,
    numbers: tl.tensor,
    chunk_best: tl.tensor,
    chunk_near: tl.tensor,  # int32 [R, chunks]: how many are near the best
    chunk_weight: tl.tensor,  # float64 [R, chunks]: sums of e^(z − best)
    num_rows: tl.tensor,
    size: tl.tensor,
    num_chunks: tl.tensor,
    edited_stride: tl.tensor,
    CHUNKS: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = divisor(numbers, row, num_rows)
    best = row_best(chunk_best, row, num_chunks, CHUNKS)
    near = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float64)
    for start in range(0, CHUNK, BLOCK):
        tokens = chunk * CHUNK + start + tl.arange(0, BLOCK)
        z = scaled(edited + row * edited_stride, tokens, size, temperature)
        valid = tokens < size
        near += ((z >= best - NEAR) & valid).to(tl.int32)
        weight += tl.where(valid, tl.exp(z.to(tl.float64) - best.to(tl.float64)), 0.0)
    tl.store(chunk_near + row * num_chunks + chunk, tl.sum(near, axis=0))
    tl.store(chunk_weight + row * num_chunks + chunk, tl.sum(weight, axis=0))


@triton.jit
def collect_kernel(
    edited: tl.tensor,
    numbers: tl.tensor,
    chunk_best: tl.tensor,
    chunk_near: tl.tensor,
    near_z: tl.tensor,  # float32 [R, V]: the near ones, in order of token
    num_rows: tl.tensor,
    size: tl.tensor,
    num_chunks: tl.tensor,
    edited_stride: tl.tensor,
    CHUNKS: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = divisor(numbers, row, num_rows)
    best = row_best(chunk_best, row, num_chunks, CHUNKS)
    position = row_sum(chunk_near, row, chunk, num_chunks, CHUNKS)
    for start in range(0, CHUNK, BLOCK):
        tokens = chunk * CHUNK + start + tl.arange(0, BLOCK)
        z = scaled(edited + row * edited_stride, tokens, size, temperature)
        near = ((z >= best - NEAR) & (tokens < size)).to(tl.int32)
        tl.store(near_z + row * size + position + tl.cumsum(near, axis=0) - 1, z, mask=near == 1)
        position += tl.sum(near, axis=0)


@triton.jit
def ordered(z: tl.tensor) -> tl.tensor:
    """Whole numbers (uint32) that compare as the floats do."""
    bits = z.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def in_order(number: tl.tensor) -> tl.tensor:
    """The float of an ordered() number."""
    bits = tl.where((number >> 31) == 1, number ^ 0x80000000, number ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weights_of(z: tl.tensor, valid: tl.tensor, floor: tl.tensor, best: tl.tensor, COUNTED: tl.constexpr) -> tl.tensor:
    """1, or e^(z − best), of the tokens at or above `floor`."""
    weights = tl.full(z.shape, 1.0, tl.float64)
    if not COUNTED:
        weights = tl.exp(z.to(tl.float64) - best.to(tl.float64))
    return tl.where(valid & (z >= floor), weights, 0.0)


@triton.jit
def weight_above(
    values: tl.tensor, count: tl.tensor, temperature: tl.tensor, floor: tl.tensor, best: tl.tensor
) -> tl.tensor:
    """The sum of e^(z − best) of the tokens at or above `floor`."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += weights_of(scaled(values, index, count, temperature), index < count, floor, best, False)
    return tl.sum(total, axis=0)


@triton.jit
def bound_reaching(
    values: tl.tensor,
    count: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    best: tl.tensor,
    target: tl.tensor,  # float64
    COUNTED: tl.constexpr,
) -> tl.tensor:
    """The largest value at which the weights of the tokens at or above it reach `target`; the lowest if none does.

    Its ordered() number is found four bits at a time: without sorting, in eight walks over the values.
    """
    sixteen = tl.arange(0, 16).to(tl.uint32)
    found = tl.full([1], 0, tl.uint32)
    shift = tl.full([1], 28, tl.uint32)
    for _ in range(8):
        thresholds = found + (sixteen << shift)
        reached = tl.zeros([16], tl.float64)
        for start in range(0, count, BLOCK):
            index = start + tl.arange(0, BLOCK)
            z = scaled(values, index, count, temperature)
            weights = weights_of(z, index < count, floor, best, COUNTED)
            above = ordered(z)[None, :] >= thresholds[:, None]
            reached += tl.sum(tl.where(above, weights[None, :], 0.0), axis=1)
        digit = tl.sum((reached >= target).to(tl.int32), axis=0) - 1
        found += tl.maximum(digit, 0).to(tl.uint32) << shift
        shift -= 4
    return tl.max(in_order(found), axis=0)


@triton.jit
def bound_kernel(
    edited: tl.tensor,
    numbers: tl.tensor,
    chunk_best: tl.tensor,
    chunk_near: tl.tensor,
    chunk_weight: tl.tensor,
    near_z: tl.tensor,
    lowest: tl.tensor,  # float64 [R]: tokens with z at or above it are left
    num_rows: tl.tensor,
    size: tl.tensor,
    num_chunks: tl.tensor,
    edited_stride: tl.tensor,
    FILTERED: tl.constexpr,  # some row has top_k or top_p; else what counts those near the best is undefined
    DRAWN: tl.constexpr,  # else top_k alone counts
    CHUNKS: tl.constexpr,
) -> None:
    """Every filter keeps the tokens at or above a bound, so the highest bound decides."""
    row = tl.program_id(0).to(tl.int64)
    best = row_best(chunk_best, row, num_chunks, CHUNKS)
    floor = tl.where(best == best, float("-inf"), best)
    bound = floor.to(tl.float64)
    if DRAWN:
        bound = tl.maximum(bound, best.to(tl.float64) - NOISE_RANGE)
        bound = tl.maximum(bound, best.to(tl.float64) + real_number(numbers, LOG_MIN_P, row, num_rows))
    if FILTERED:
        temperature = divisor(numbers, row, num_rows)
        num_near = row_sum(chunk_near, row, num_chunks, num_chunks, CHUNKS)
        near_row, whole_row = near_z + row * size, edited + row * edited_stride
        top_k = whole_number(numbers, TOP_K, row, num_rows)
        if (top_k > 0) & (top_k < size):
            if num_near >= top_k:
                floor = bound_reaching(near_row, num_near, 1.0, floor, best, top_k.to(tl.float64), True)
            else:
                floor = bound_reaching(whole_row, size, temperature, floor, best, top_k.to(tl.float64), True)
            bound = tl.maximum(bound, floor.to(tl.float64))
        if DRAWN:
            top_p = real_number(numbers, TOP_P, row, num_rows)
            if top_p < 1.0:
                near_weight = weight_above(near_row, num_near, 1.0, floor, best)
                total = row_sum(chunk_weight, row, num_chunks, num_chunks, CHUNKS)
                if floor >= best - NEAR:
                    total = near_weight
                elif floor > float("-inf"):
                    total = weight_above(whole_row, size, temperature, floor, best)
                target = total * top_p
                if near_weight >= target:
                    nucleus = bound_reaching(near_row, num_near, 1.0, floor, best, target, False)
                else:
                    nucleus = bound_reaching(whole_row, size, temperature, floor, best, target, False)
                bound = tl.maximum(bound, nucleus.to(tl.float64))
    tl.store(lowest + row, bound)
