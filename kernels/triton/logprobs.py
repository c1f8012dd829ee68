"""Log probabilities, ranks and the most likely tokens on the GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kernels.interface import LogprobsResult
from kernels.triton.bounds import Rows
from kernels.triton.vocabulary import BLOCK, CHUNK, FIELDS, TOP_K, row_sum, to_device


def logprobs(logits: torch.Tensor, token_ids: npt.NDArray[np.int32], top: int) -> LogprobsResult:
    """See KernelSet.logprobs. Normalised in float64."""
    num_rows, size = logits.shape
    top = min(top, size)
    if num_rows == 0:
        nothing = np.empty((0, top), np.int32)
        return LogprobsResult(np.empty(0, np.float32), np.empty(0, np.int32), nothing, nothing.astype(np.float32))
    numbers = np.zeros((FIELDS, num_rows), np.int64)
    numbers[TOP_K.value] = top
    rows = Rows(logits, logits, to_device(numbers, logits.device))
    rows.find_best()
    if top > 0:
        rows.find_bounds(filtered=True, drawn=False)
    else:
        rows.find_weights()
    asked = to_device(token_ids, logits.device)
    counts = rows.new((4, *rows.grid), torch.int32)
    count_kernel[rows.grid](
        logits, asked, rows.lowest, counts,
        num_rows, size, rows.num_chunks, logits.stride(0), LISTED=top > 0,
    )  # fmt: skip
    values = logits.gather(1, asked[:, None].long())[:, 0]
    host_counts, best, weight = (array.cpu().numpy() for array in (counts, rows.best, rows.weight))
    with np.errstate(invalid="ignore", divide="ignore"):  # a row of −inf, or with a NaN
        normaliser = best.max(axis=1).astype(np.float64) + np.log(weight.sum(axis=1))
        logprob = (values.cpu().numpy() - normaliser).astype(np.float32)
        top_ids, top_values = _most_likely(rows, counts, top)
        top_logprobs = (top_values - normaliser[:, None]).astype(np.float32)
    rank = (host_counts[0].sum(axis=1) + host_counts[1].sum(axis=1) + 1).astype(np.int32)
    return LogprobsResult(logprob, rank, top_ids, top_logprobs)


def _most_likely(rows: Rows, counts: torch.Tensor, top: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Ids and values [R, top], by value, the largest first, ties by the lowest id. Undefined in a row with a NaN."""
    shape, device = (rows.num_rows, top), rows.logits.device
    ids = torch.zeros(shape, dtype=torch.int32, device=device)
    values = torch.zeros(shape, dtype=torch.float32, device=device)
    if top > 0:
        list_kernel[rows.grid](
            rows.logits, rows.lowest, counts[2], counts[3], ids, values,
            rows.size, rows.num_chunks, rows.logits.stride(0), top, CHUNKS=rows.chunks,
        )  # fmt: skip
    host_ids, host_values = ids.cpu().numpy(), values.cpu().numpy()
    order = np.lexsort((host_ids, -host_values), axis=1)
    return np.take_along_axis(host_ids, order, axis=1), np.take_along_axis(host_values, order, axis=1)


@triton.jit
def count_kernel(
    logits: tl.tensor,
    token_ids: tl.tensor,  # int32 [R]
    lowest: tl.tensor,  # float64 [R]
    # int32 [4, R, chunks]: above the asked token, equal to it with a lower id; above `lowest`, equal to it
    counts: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    num_chunks: tl.tensor,
    logits_stride: tl.tensor,
    LISTED: tl.constexpr,  # else there is no `lowest`
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    asked = tl.load(token_ids + row)
    value = tl.load(logits + row * logits_stride + asked)
    above, before = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    listed, tied = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, CHUNK, BLOCK):
        tokens = chunk * CHUNK + start + tl.arange(0, BLOCK)
        valid = tokens < size
        z = tl.load(logits + row * logits_stride + tokens, mask=valid, other=float("-inf"))
        above += ((z > value) & valid).to(tl.int32)
        before += ((z == value) & (tokens < asked)).to(tl.int32)
        if LISTED:
            bound = tl.load(lowest + row)
            listed += ((z.to(tl.float64) > bound) & valid).to(tl.int32)
            tied += ((z.to(tl.float64) == bound) & valid).to(tl.int32)
    at, stride = counts + row * num_chunks + chunk, num_rows * num_chunks
    tl.store(at, tl.sum(above, axis=0))
    tl.store(at + stride, tl.sum(before, axis=0))
    if LISTED:
        tl.store(at + 2 * stride, tl.sum(listed, axis=0))
        tl.store(at + 3 * stride, tl.sum(tied, axis=0))


@triton.jit
def list_kernel(
    logits: tl.tensor,
    lowest: tl.tensor,
    listed: tl.tensor,  # int32 [R, chunks], as count_kernel left them
    tied: tl.tensor,
    top_ids: tl.tensor,  # int32 [R, top]: those above the bound in order of token, then the first of those at it
    top_values: tl.tensor,  # float32 [R, top]
    size: tl.tensor,
    num_chunks: tl.tensor,
    logits_stride: tl.tensor,
    top: tl.tensor,
    CHUNKS: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bound = tl.load(lowest + row)
    above_at = row_sum(listed, row, chunk, num_chunks, CHUNKS)
    tied_at = row_sum(listed, row, num_chunks, num_chunks, CHUNKS) + row_sum(tied, row, chunk, num_chunks, CHUNKS)
    for start in range(0, CHUNK, BLOCK):
        tokens = chunk * CHUNK + start + tl.arange(0, BLOCK)
        valid = tokens < size
        z = tl.load(logits + row * logits_stride + tokens, mask=valid, other=float("-inf"))
        is_above = ((z.to(tl.float64) > bound) & valid).to(tl.int32)
        is_tied = ((z.to(tl.float64) == bound) & valid).to(tl.int32)
        place = (
            tl.where(is_above == 1, above_at + tl.cumsum(is_above, axis=0), tied_at + tl.cumsum(is_tied, axis=0)) - 1
        )
        kept = ((is_above | is_tied) == 1) & (place < top)
        tl.store(top_ids + row * top + place, tokens, mask=kept)
        tl.store(top_values + row * top + place, z, mask=kept)
        above_at += tl.sum(is_above, axis=0)
        tied_at += tl.sum(is_tied, axis=0)
