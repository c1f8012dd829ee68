"""What the products have in common: codes as operands, and K split over programs with a fixed order of summation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MULTIPROCESSORS = 132  # of a Hopper card; a constant, so that no result depends on the card
_MOST_SPLITS = 16
_REDUCED_AT_ONCE = 1024


def num_splits(num_tiles: int, num_steps: int, least_steps: int, resident: int) -> int:
    """Into how many parts K is split: up to `resident` programs for each multiprocessor, at least `least_steps` of the
    loop in each.

    Equal for equal arguments: a product whose tiles do not depend on the batch is summed alike in every batch.
    """
    return max(1, min(_MOST_SPLITS, resident * _MULTIPROCESSORS // max(1, num_tiles), num_steps // least_steps))


def new_partial_sums(splits: int, out: torch.Tensor) -> torch.Tensor:
    """float32 [splits, *out.shape]."""
    return torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)


def reduce_splits(partial: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [T, N] = the partial sums [splits, T, N] added in order of split, and the bias [N]."""
    splits, num_tokens, num_outputs = partial.shape
    grid = (num_tokens, triton.cdiv(num_outputs, _REDUCED_AT_ONCE))
    reduce_splits_kernel[grid](
        partial,
        out if bias is None else bias,
        out,
        num_outputs,
        partial.stride(0),
        out.stride(0),
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        BLOCK=_REDUCED_AT_ONCE,
    )


@triton.jit
def reduce_splits_kernel(
    partial: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_outputs: tl.tensor,
    split_stride: tl.tensor,
    out_stride: tl.tensor,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per token and block of outputs."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < num_outputs
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + split * split_stride + token * num_outputs + n, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + n, total.to(out.dtype.element_ty), mask=mask)
