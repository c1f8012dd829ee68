"""Rows of logits, each cut into chunks of CHUNK tokens: one program works on one chunk.

What the chunks of a row leave is put together in order of chunk. z is the logit, edited, divided by the row's
temperature (by 1 where that is 0: greedy). Steps that KernelSet.sample wants in float64 are in float64. `numbers` are
the rows' parameters, int64 [FIELDS, R], some of them the bits of a float64.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kernels.reference.arrays import from_host

CHUNK = tl.constexpr(4096)
BLOCK = tl.constexpr(1024)
NEAR = tl.constexpr(12.0)  # tokens within NEAR of the best are looked at first: those further off weigh e⁻¹² at most
NOISE_RANGE = tl.constexpr(26.125)  # the noise lies in [−3.14, 22.88]: a token further below the best cannot win
NO_TOKEN = tl.constexpr(-1)
NO_ID = tl.constexpr(0x7FFFFFFF)

SEED = tl.constexpr(0)
CHOICE_INDEX = tl.constexpr(1)
OUTPUT_POSITION = tl.constexpr(2)
TOP_K = tl.constexpr(3)  # 0 or the vocabulary's size and more = off
TEMPERATURE = tl.constexpr(4)  # float64
TOP_P = tl.constexpr(5)  # float64
LOG_MIN_P = tl.constexpr(6)  # float64; −inf = off
FIELDS = 7
EXACT = {"enable_fp_fusion": False}  # a product and a sum are rounded one after the other, as on the CPU


def to_device(host: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A small array; not waited for."""
    return from_host(host).to(device, non_blocking=True)


@triton.jit
def whole_number(numbers: tl.tensor, field: tl.constexpr, row: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    return tl.load(numbers + field * num_rows + row)


@triton.jit
def real_number(numbers: tl.tensor, field: tl.constexpr, row: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    return tl.load(numbers + field * num_rows + row).to(tl.float64, bitcast=True)


@triton.jit
def divisor(numbers: tl.tensor, row: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    temperature = real_number(numbers, TEMPERATURE, row, num_rows).to(tl.float32)
    return tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def scaled(logits: tl.tensor, tokens: tl.tensor, size: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """z of tokens of a row of `size`; −inf past its end. Divided as IEEE 754 has it: bounds are compared exactly."""
    x = tl.load(logits + tokens, mask=tokens < size, other=float("-inf"))
    return tl.div_rn(x, tl.full(x.shape, 0.0, tl.float32) + temperature)


@triton.jit
def row_best(chunk_best: tl.tensor, row: tl.tensor, num_chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    """The largest z of a row."""
    chunks = tl.arange(0, CHUNKS)
    return tl.max(
        tl.load(chunk_best + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")), axis=0
    )


@triton.jit
def row_sum(
    values: tl.tensor, row: tl.tensor, first_chunks: tl.tensor, num_chunks: tl.tensor, CHUNKS: tl.constexpr
) -> tl.tensor:
    """The sum of what the first chunks of a row left."""
    chunks = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(values + row * num_chunks + chunks, mask=chunks < first_chunks, other=0), axis=0)
