"""From logits to tokens on the GPU: all rows of a batch together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kernels.interface import SamplingBatch
from kernels.triton import logit_edits
from kernels.triton.bounds import Rows
from kernels.triton.vocabulary import (
    BLOCK,
    CHOICE_INDEX,
    CHUNK,
    EXACT,
    FIELDS,
    LOG_MIN_P,
    NO_ID,
    OUTPUT_POSITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    divisor,
    real_number,
    scaled,
    to_device,
    whole_number,
)

_NO_TOKEN = tl.constexpr(-1)


def sample(logits: torch.Tensor, batch: SamplingBatch) -> npt.NDArray[np.int32]:
    """One token id per row; see KernelSet.sample."""
    num_rows = logits.shape[0]
    if num_rows == 0:
        return np.empty(0, np.int32)
    edited = logit_edits.edit(logits, batch)
    rows = Rows(logits, logits if edited is None else edited, _numbers(batch, logits.device))
    rows.find_best()
    score, drawn = rows.new(rows.grid, torch.float32), rows.new(rows.grid, torch.int32)
    is_drawn = bool(batch.temperature.any())
    if is_drawn:
        rows.find_bounds(filtered=bool((batch.top_k > 0).any() or (batch.top_p < 1.0).any()), drawn=True)
        draw_kernel[rows.grid](
            rows.edited, rows.numbers, rows.lowest, score, drawn,
            rows.num_rows, rows.size, rows.num_chunks, rows.edited.stride(0), **EXACT,
        )  # fmt: skip
    picked = rows.new((num_rows,), torch.int32)
    pick_kernel[(num_rows,)](
        rows.numbers, rows.best, rows.token, rows.nan, score, drawn, picked,
        rows.num_rows, rows.num_chunks, DRAWN=is_drawn, CHUNKS=rows.chunks, **EXACT,
    )  # fmt: skip
    tokens: npt.NDArray[np.int32] = picked.cpu().numpy()
    return tokens


def _numbers(batch: SamplingBatch, device: torch.device) -> torch.Tensor:
    """The rows' parameters as the kernels read them: one copy to the device."""
    host = np.empty((FIELDS, len(batch.temperature)), np.int64)
    real = host.view(np.float64)
    host[SEED.value] = batch.seed.astype(np.uint64).view(np.int64)
    host[CHOICE_INDEX.value] = batch.choice_index
    host[OUTPUT_POSITION.value] = batch.output_position
    host[TOP_K.value] = batch.top_k
    real[TEMPERATURE.value] = batch.temperature
    real[TOP_P.value] = batch.top_p
    with np.errstate(divide="ignore"):  # 0 = off: −inf
        real[LOG_MIN_P.value] = np.log(batch.min_p.astype(np.float64))
    return to_device(host, device)


@triton.jit
def gumbel(tokens: tl.tensor, seed: tl.tensor, output_position: tl.tensor, choice_index: tl.tensor) -> tl.tensor:
    """KernelSet.sample's noise, float32; Triton's generator is Philox4x32-10, keyed by the seed's low and high word."""
    zeros = tl.zeros_like(tokens)
    word, _, _, _ = tl.philox(seed, tokens, zeros + output_position, zeros + choice_index, zeros)
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2⁻³²
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def draw_kernel(
    edited: tl.tensor,
    numbers: tl.tensor,
    lowest: tl.tensor,
    chunk_score: tl.tensor,  # float32 [R, chunks]
    chunk_drawn: tl.tensor,  # int32 [R, chunks]
    num_rows: tl.tensor,
    size: tl.tensor,
    num_chunks: tl.tensor,
    edited_stride: tl.tensor,
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = divisor(numbers, row, num_rows)
    seed = whole_number(numbers, SEED, row, num_rows)
    position = whole_number(numbers, OUTPUT_POSITION, row, num_rows).to(tl.int32)
    choice = whole_number(numbers, CHOICE_INDEX, row, num_rows).to(tl.int32)
    bound = tl.load(lowest + row)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.full([BLOCK], NO_ID, tl.int32)
    for start in range(0, CHUNK, BLOCK):
        tokens = chunk * CHUNK + start + tl.arange(0, BLOCK)
        z = scaled(edited + row * edited_stride, tokens, size, temperature)
        left = z.to(tl.float64) >= bound
        if tl.max(left.to(tl.int32), axis=0) == 1:  # noise costs two logarithms in float64
            score = tl.where(left, z + gumbel(tokens, seed, position, choice), float("-inf"))
            better = score > best
            best, best_token = tl.where(better, score, best), tl.where(better, tokens, best_token)
    largest = tl.max(best, axis=0)
    tl.store(chunk_score + row * num_chunks + chunk, largest)
    tl.store(chunk_drawn + row * num_chunks + chunk, tl.min(tl.where(best == largest, best_token, NO_ID), axis=0))


@triton.jit
def pick_kernel(
    numbers: tl.tensor,
    chunk_best: tl.tensor,
    chunk_token: tl.tensor,
    chunk_nan: tl.tensor,
    chunk_score: tl.tensor,
    chunk_drawn: tl.tensor,
    picked: tl.tensor,  # int32 [R]
    num_rows: tl.tensor,
    num_chunks: tl.tensor,
    DRAWN: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """The greedy token where the temperature is 0 or the best z infinite, else the drawn one; ties to the lowest id."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    at, valid = row * num_chunks + chunks, chunks < num_chunks
    z = tl.load(chunk_best + at, mask=valid, other=float("-inf"))
    best = tl.max(z, axis=0)
    token = tl.min(tl.where(z == best, tl.load(chunk_token + at, mask=valid, other=NO_ID), NO_ID), axis=0)
    if DRAWN:
        scores = tl.load(chunk_score + at, mask=valid, other=float("-inf"))
        drawn_tokens = tl.load(chunk_drawn + at, mask=valid, other=NO_ID)
        drawn = tl.min(tl.where(scores == tl.max(scores, axis=0), drawn_tokens, NO_ID), axis=0)
        is_greedy = (real_number(numbers, TEMPERATURE, row, num_rows) == 0.0) | (tl.abs(best) == float("inf"))
        token = tl.where(is_greedy, token, drawn)
    has_nan = tl.max(tl.load(chunk_nan + at, mask=valid, other=0), axis=0) > 0
    tl.store(picked + row, tl.where(has_nan | (best == float("-inf")), _NO_TOKEN, token))
