"""Products that do not depend on the batch: one tile configuration, and K split alike, for any number of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.device import dot
from kernels.triton.products import new_partial_sums, num_splits, reduce_splits

_TOKENS, _OUTPUTS, _INPUTS = 64, 128, 64
_LEAST_INPUTS_A_SPLIT = 512


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [T, N] = x [T, K] · Wᵀ + bias, weight [N, K]; each row is summed in float32 in an order of its own."""
    num_tokens, num_outputs = out.shape
    if num_tokens == 0:
        return
    num_inputs = weight.shape[1]
    tiles_n, tiles_m = triton.cdiv(num_outputs, _OUTPUTS), triton.cdiv(num_tokens, _TOKENS)
    num_steps = triton.cdiv(num_inputs, _INPUTS)
    splits = num_splits(tiles_n, num_steps, _LEAST_INPUTS_A_SPLIT // _INPUTS, resident=2)
    target = out if splits == 1 else new_partial_sums(splits, out)
    invariant_linear_kernel[(tiles_n, tiles_m, splits)](
        x,
        weight,
        target if bias is None else bias,
        target,
        num_tokens,
        num_outputs,
        num_inputs,
        triton.cdiv(num_steps, splits),
        x.stride(0),
        weight.stride(0),
        target.stride(-2),
        target.stride(0),
        HAS_BIAS=bias is not None and splits == 1,
        BLOCK_M=_TOKENS,
        BLOCK_N=_OUTPUTS,
        BLOCK_K=_INPUTS,
        num_warps=8,
        num_stages=2 if x.element_size() == 4 else 4,
    )
    if splits > 1:
        reduce_splits(target, bias, out)


@triton.jit
def invariant_linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    steps_a_split: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    out_stride: tl.tensor,
    out_split_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program per tile of outputs, tile of tokens and part of K."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    split = tl.program_id(2)
    n_mask, m_mask = n < num_outputs, m < num_tokens
    x_rows = x + m[:, None] * x_stride
    weight_rows = weight + n[None, :] * weight_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = split * steps_a_split
    for step in range(first, tl.minimum(first + steps_a_split, tl.cdiv(num_inputs, BLOCK_K))):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        k_mask = k < num_inputs
        x_tile = tl.load(x_rows + k[None, :], mask=m_mask[:, None] & k_mask[None, :], other=0.0)
        weight_tile = tl.load(weight_rows + k[:, None], mask=n_mask[None, :] & k_mask[:, None], other=0.0)
        acc = dot(x_tile, weight_tile, acc)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    target = out + split.to(tl.int64) * out_split_stride + m[:, None] * out_stride + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :])
