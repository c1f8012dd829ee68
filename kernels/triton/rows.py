"""Rows and blocks moved whole: gathers of rows, copies of KV blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference.kv_cache import KVCache
from kernels.triton.device import narrow

_BLOCK = 1024
_WORD = torch.int32


@triton.jit
def gather_rows_kernel(
    x: tl.tensor,
    rows: tl.tensor,  # int32
    out: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    scale: tl.tensor,
    SCALED: tl.constexpr,  # else the elements are moved as they are
    ACCUMULATE: tl.constexpr,  # with SCALED: added to what is there
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (rows, blocks of columns)."""
    row, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows + row).to(tl.int64)
    target = out + row.to(tl.int64) * out_stride + columns
    values = tl.load(x + source * x_stride + columns, mask=columns < width)
    if SCALED:
        values = values.to(tl.float32) * scale
        if ACCUMULATE:
            values += tl.load(target, mask=columns < width).to(tl.float32)
        values = narrow(values, out.dtype.element_ty)
    tl.store(target, values, mask=columns < width)


@triton.jit
def copy_blocks_kernel(
    words: tl.tensor,  # [num_blocks, words of a block]
    sources: tl.tensor,  # int32
    targets: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """No block may be both a source and a target. Grid: (copies, parts of a block)."""
    copy, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, target = tl.load(sources + copy).to(tl.int64), tl.load(targets + copy).to(tl.int64)
    values = tl.load(words + source * stride + columns, mask=columns < width)
    tl.store(words + target * stride + columns, values, mask=columns < width)


def gather_rows(
    x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, scale: float = 1.0, accumulate: bool = False
) -> None:
    """out[r] = scale · x[rows[r]], or that added to out."""
    num_rows, width = out.shape
    if num_rows:
        gather_rows_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
            x,
            rows,
            out,
            width,
            x.stride(0),
            out.stride(0),
            scale,
            SCALED=scale != 1.0 or accumulate,
            ACCUMULATE=accumulate,
            BLOCK=_BLOCK,
        )


def copy_blocks(cache: KVCache, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy blocks of which none is both a source and a target; int32 ids on the device."""
    words = cache.blocks.view(_WORD) if cache.blocks.shape[1] * cache.blocks.itemsize % 4 == 0 else cache.blocks
    width = words.shape[1]
    copy_blocks_kernel[(len(sources), triton.cdiv(width, _BLOCK))](
        words, sources, targets, width, words.stride(0), BLOCK=_BLOCK
    )
