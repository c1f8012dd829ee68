"""Products with quantised weights, and rows of them.

The weights stand on the left of the dot, tokens on its right: the tensor cores then work on 64 outputs at a time
however few tokens there are, and the codes go from memory through registers into the product. The codes of a group are
multiplied as whole numbers, and the group's scale is applied to the sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.device import dot, operand
from kernels.triton.products import new_partial_sums, num_splits, reduce_splits
from kernels.triton.quantized_weights import QuantizedWeight

_LEAST_INPUTS_A_SPLIT = 256
_GATHERED_AT_ONCE = 1024


_FEW_TOKENS = 16
_MANY_TOKENS = (
    256  # more: writing the weight down in the activations' type is cheap beside the library's faster product
)
_WRITTEN_AT_ONCE = 1 << 26  # elements of such a copy
_OUTPUTS = 64  # of a tile
_WIDE_OUTPUTS = 32  # with float32 activations, for which there are no tensor cores: everything in registers


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor, batch_invariant: bool
) -> None:
    """out [T, N] = x [T, K] · Wᵀ + bias, summed in float32.

    With `batch_invariant` one configuration serves every T. Otherwise up to 16 tokens share one, and many tokens are
    multiplied by the library.
    """
    num_tokens = out.shape[0]
    if num_tokens == 0:
        return
    if batch_invariant:
        _in_tiles(x, weight, bias, out, _MANY_TOKENS // 4, counts_tokens=False)
    elif num_tokens <= _FEW_TOKENS:
        _in_tiles(x, weight, bias, out, _FEW_TOKENS, counts_tokens=False)
    elif num_tokens <= _MANY_TOKENS:
        _in_tiles(x, weight, bias, out, _MANY_TOKENS // 4, counts_tokens=True)
    else:
        _by_library(x, weight, bias, out)


def _in_tiles(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile_tokens: int,
    counts_tokens: bool,
) -> None:
    """The kernel; `counts_tokens`: the more tiles of tokens, the fewer parts of K."""
    num_tokens, num_outputs = out.shape
    kind, num_steps = weight.format, weight.codes.shape[0]
    tile_outputs = _OUTPUTS
    if x.element_size() == 4:
        tile_tokens, tile_outputs = _FEW_TOKENS, _WIDE_OUTPUTS
    tiles_n, tiles_m = triton.cdiv(num_outputs, tile_outputs), triton.cdiv(num_tokens, tile_tokens)
    least_steps = triton.cdiv(_LEAST_INPUTS_A_SPLIT, kind.group * 8 // kind.bits)
    splits = num_splits(tiles_n * tiles_m if counts_tokens else tiles_n, num_steps, least_steps, resident=4)
    target = out if splits == 1 else new_partial_sums(splits, out)
    quantized_linear_kernel[(tiles_n, tiles_m, splits)](
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        target if bias is None else bias,
        target,
        num_tokens,
        num_outputs,
        weight.num_inputs,
        num_steps,
        triton.cdiv(num_steps, splits),
        x.stride(0),
        target.stride(-2),
        target.stride(0),
        BITS=kind.bits,
        GROUP=kind.group,
        PER_CHANNEL=kind.per_channel,
        HAS_MINIMUM=kind.has_minimum,
        HAS_BIAS=bias is not None and splits == 1,
        BLOCK_M=tile_tokens,
        BLOCK_N=tile_outputs,
        num_warps=4,
        num_stages=4 if tile_tokens == _FEW_TOKENS else max(2, 128 // kind.group),  # within half the shared memory
    )
    if splits > 1:
        reduce_splits(target, bias, out)


def _by_library(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Some outputs after the other: their weights in the activations' type, then a product of the library."""
    at_once = max(1, _WRITTEN_AT_ONCE // weight.num_inputs)
    for first in range(0, weight.num_outputs, at_once):
        rows = torch.arange(first, min(weight.num_outputs, first + at_once), dtype=torch.int32, device=x.device)
        plain = torch.empty((len(rows), weight.num_inputs), dtype=x.dtype, device=x.device)
        quantized_embedding(rows, weight, plain, 1.0, False)
        here = out[:, first : first + at_once]
        here.copy_(torch.mm(x, plain.t()))
        if bias is not None:
            here.add_(bias[first : first + at_once])


def quantized_embedding(
    token_ids: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor, scale: float, accumulate: bool
) -> None:
    """out [T, K] = scale · rows of the weight [T], or that added to out."""
    num_tokens = token_ids.shape[0]
    if num_tokens == 0:
        return
    kind = weight.format
    quantized_embedding_kernel[(num_tokens, triton.cdiv(weight.num_inputs, _GATHERED_AT_ONCE))](
        token_ids,
        weight.codes,
        weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        out,
        weight.num_outputs,
        weight.num_inputs,
        out.stride(0),
        scale,
        BITS=kind.bits,
        GROUP=kind.group,
        PER_CHANNEL=kind.per_channel,
        HAS_MINIMUM=kind.has_minimum,
        ACCUMULATE=accumulate,
        BLOCK=_GATHERED_AT_ONCE,
    )


@triton.jit
def quantized_linear_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    num_steps: tl.tensor,
    steps_a_split: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    out_split_stride: tl.tensor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program per tile of outputs, tile of tokens and part of K; a step of its loop is one tile of bytes."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    split = tl.program_id(2)
    k = tl.arange(0, GROUP)
    n_mask, m_mask = n < num_outputs, m < num_tokens
    x_rows = x + m[None, :] * x_stride
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = split * steps_a_split
    for step in range(first, tl.minimum(first + steps_a_split, num_steps)):
        rows = step * num_outputs + n
        tile = tl.load(codes + rows[:, None] * GROUP + k[None, :], mask=n_mask[:, None], other=0)
        if BITS == 4:
            acc = _add_group(
                acc, tile & 15, 2 * step, x_rows, scales, minima, n, k, n_mask, m_mask, num_outputs, num_inputs,
                BITS, GROUP, PER_CHANNEL, HAS_MINIMUM,
            )  # fmt: skip
            acc = _add_group(
                acc, tile >> 4, 2 * step + 1, x_rows, scales, minima, n, k, n_mask, m_mask, num_outputs, num_inputs,
                BITS, GROUP, PER_CHANNEL, HAS_MINIMUM,
            )  # fmt: skip
        else:
            acc = _add_group(
                acc, tile, step, x_rows, scales, minima, n, k, n_mask, m_mask, num_outputs, num_inputs,
                BITS, GROUP, PER_CHANNEL, HAS_MINIMUM,
            )  # fmt: skip
    if PER_CHANNEL:
        acc *= tl.load(scales + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    target = out + split.to(tl.int64) * out_split_stride + m[None, :] * out_stride + n[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=n_mask[:, None] & m_mask[None, :])


@triton.jit
def _add_group(
    acc: tl.tensor,
    codes: tl.tensor,
    group: tl.tensor,
    x_rows: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    n_mask: tl.tensor,
    m_mask: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
) -> tl.tensor:
    """acc [N, M] + a group's part of the product; codes [N, GROUP]."""
    inputs = group * GROUP + k
    x = tl.load(x_rows + inputs[:, None], mask=(inputs < num_inputs)[:, None] & m_mask[None, :], other=0.0)
    weights = codes.to(tl.int8)
    if BITS == 4 and not HAS_MINIMUM:
        weights = weights - 8
    weights = operand(weights, x.dtype)
    if PER_CHANNEL:
        return dot(weights, x, acc)
    scale = tl.load(scales + group * num_outputs + n, mask=n_mask, other=0.0).to(tl.float32)
    acc += scale[:, None] * dot(weights, x, tl.zeros_like(acc))
    if HAS_MINIMUM:
        minimum = tl.load(minima + group * num_outputs + n, mask=n_mask, other=0.0).to(tl.float32)
        acc += minimum[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
    return acc


@triton.jit
def quantized_embedding_kernel(
    token_ids: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    out: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    out_stride: tl.tensor,
    factor: tl.tensor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per token and block of inputs."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids + token).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = k < num_inputs
    group = (k // GROUP).to(tl.int64)
    tile = group // 2 if BITS == 4 else group
    codes_here = tl.load(codes + (tile * num_outputs + row) * GROUP + k % GROUP, mask=mask, other=0)
    if BITS == 4:
        weights = ((codes_here >> ((group % 2) * 4).to(tl.uint8)) & 15).to(tl.float32)
        if not HAS_MINIMUM:
            weights -= 8.0
    else:
        weights = codes_here.to(tl.float32)
    if PER_CHANNEL:
        weights *= tl.load(scales + row).to(tl.float32)
    else:
        weights *= tl.load(scales + group * num_outputs + row, mask=mask, other=0.0).to(tl.float32)
    if HAS_MINIMUM:
        weights += tl.load(minima + group * num_outputs + row, mask=mask, other=0.0).to(tl.float32)
    weights *= factor
    target = out + token * out_stride + k
    if ACCUMULATE:
        weights += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, weights.to(out.dtype.element_ty), mask=mask)
