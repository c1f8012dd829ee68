"""RMSNorm and LayerNorm, with or without the sum with a residual first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.device import narrow, power_of_two_at_least

_TILE = 1024  # elements of a program that takes several short rows


@triton.jit
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,  # unused without HAS_RESIDUAL
    weight: tl.tensor,  # float32
    bias: tl.tensor,  # float32; unused without HAS_BIAS
    out: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,  # row r is head r % num_heads of token r // num_heads
    width: tl.tensor,
    x_stride: tl.tensor,
    x_head_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """ROWS rows a program; the residual's rows have one head."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    token, head = (rows // num_heads).to(tl.int64), rows % num_heads
    sources = (token * x_stride + head * x_head_stride)[:, None] + columns[None, :]
    values = tl.load(x + sources, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        places = residual + (token * residual_stride)[:, None] + columns[None, :]
        total = values + tl.load(places, mask=inside, other=0.0).to(tl.float32)
        total = narrow(total, residual.dtype.element_ty)
        tl.store(places, total, mask=inside)
        values = total.to(tl.float32)
    if CENTRED:
        mean = tl.sum(values, axis=1) / width
        values = tl.where(inside, values - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / width + eps)
    normed = values * inverse[:, None] * tl.load(weight + columns, mask=columns < width, other=0.0)[None, :]
    if HAS_BIAS:
        normed += tl.load(bias + columns, mask=columns < width, other=0.0)[None, :]
    targets = (token * out_stride + head * out_head_stride)[:, None] + columns[None, :]
    tl.store(out + targets, narrow(normed, out.dtype.element_ty), mask=inside)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    centred: bool,
) -> None:
    """KernelSet.layer_norm if centred, else rms_norm."""
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_rows, width = x.shape[0] * num_heads, x.shape[-1]
    if num_rows == 0:
        return
    padded = power_of_two_at_least(width)
    rows = max(1, _TILE // padded)
    norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        x if residual is None else residual,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        num_heads,
        width,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        out.stride(1) if out.dim() == 3 else 0,
        eps,
        ROWS=rows,
        WIDTH=padded,
        CENTRED=centred,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        num_warps=min(16, max(2, rows * padded // 512)),
    )
