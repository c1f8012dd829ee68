"""Masks, bias and penalties, on a copy of the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kernels.interface import SamplingBatch
from kernels.triton.vocabulary import BLOCK, CHUNK, EXACT, to_device

_ENTRIES = 256

ALLOWED = tl.constexpr(0)
BANNED = tl.constexpr(1)
BIAS = tl.constexpr(2)
PENALTIES = tl.constexpr(3)


def edit(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor | None:
    """Masks, bias and penalties on a copy; None when there are none."""
    mask, allowed, penalties = batch.mask, batch.allowed, batch.penalties
    if all(part is None for part in (mask, allowed, batch.banned, batch.bias, penalties)):
        return None
    device, (num_rows, size) = logits.device, logits.shape
    edited = torch.empty((num_rows, size), dtype=torch.float32, device=device)
    mask_rows = bits = edited  # not looked at without a mask
    if mask is not None:
        mask_rows, bits = to_device(mask.rows, device), to_device(mask.bits.view(np.int32), device)
    allowed_starts = edited if allowed is None else to_device(allowed.row_starts, device)
    masked_copy_kernel[(num_rows, -(-size // CHUNK.value))](
        logits, edited, mask_rows, bits, allowed_starts, size, logits.stride(0), bits.stride(0),
        HAS_MASK=mask is not None, HAS_ALLOWED=allowed is not None,
    )  # fmt: skip

    def entries(
        kind: int,
        row_starts: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        values: npt.NDArray[Any],
        factors: torch.Tensor,
    ) -> None:
        if len(token_ids):
            edit_kernel[(num_rows,)](
                logits, edited, to_device(row_starts, device), to_device(token_ids, device),
                to_device(values, device), factors, mask_rows, bits,
                num_rows, size, logits.stride(0), bits.stride(0),
                KIND=kind, HAS_MASK=mask is not None, ENTRIES=_ENTRIES, **EXACT,
            )  # fmt: skip

    if allowed is not None:
        entries(ALLOWED.value, allowed.row_starts, allowed.token_ids, allowed.token_ids, edited)
    if batch.banned is not None:
        entries(BANNED.value, batch.banned.row_starts, batch.banned.token_ids, batch.banned.token_ids, edited)
    if batch.bias is not None:
        entries(BIAS.value, batch.bias.row_starts, batch.bias.token_ids, batch.bias.values, edited)
    if penalties is not None:
        factors = to_device(np.stack((penalties.repetition, penalties.presence, penalties.frequency)), device)
        entries(PENALTIES.value, penalties.row_starts, penalties.token_ids, penalties.output_counts, factors)
    return edited


@triton.jit
def is_permitted(
    mask_rows: tl.tensor, bits: tl.tensor, row: tl.tensor, tokens: tl.tensor, valid: tl.tensor, mask_words: tl.tensor
) -> tl.tensor:
    """What the row's dense mask says of tokens."""
    index = tl.zeros_like(tokens) + tl.load(mask_rows + row)
    words = tl.load(bits + index.to(tl.int64) * mask_words + tokens // 32, mask=valid & (index >= 0), other=-1)
    return ((words >> (tokens % 32)) & 1) == 1


@triton.jit
def masked_copy_kernel(
    logits: tl.tensor,
    edited: tl.tensor,  # float32 [R, V]
    mask_rows: tl.tensor,  # int32 [R]
    bits: tl.tensor,  # int32 [M, words]
    allowed_starts: tl.tensor,  # int32 [R + 1]
    size: tl.tensor,
    logits_stride: tl.tensor,
    mask_words: tl.tensor,
    HAS_MASK: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
) -> None:
    """A copy without what the dense mask forbids, and without anything where a list of allowed tokens follows."""
    row = tl.program_id(0).to(tl.int64)
    closed = False
    if HAS_ALLOWED:
        closed = tl.load(allowed_starts + row + 1) > tl.load(allowed_starts + row)
    for start in range(0, CHUNK, BLOCK):
        tokens = tl.program_id(1) * CHUNK + start + tl.arange(0, BLOCK)
        valid = tokens < size
        z = tl.load(logits + row * logits_stride + tokens, mask=valid, other=float("-inf"))
        if HAS_MASK:
            z = tl.where(is_permitted(mask_rows, bits, row, tokens, valid, mask_words), z, float("-inf"))
        if HAS_ALLOWED:
            z = tl.where(closed, float("-inf"), z)
        tl.store(edited + row * size + tokens, z, mask=valid)


@triton.jit
def edit_kernel(
    logits: tl.tensor,
    edited: tl.tensor,  # in place
    starts: tl.tensor,  # int32 [R + 1]
    token_ids: tl.tensor,  # int32
    values: tl.tensor,  # of BIAS: float32; of PENALTIES: int32 counts
    factors: tl.tensor,  # of PENALTIES: float32 [3, R]: repetition, presence, frequency
    mask_rows: tl.tensor,
    bits: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    logits_stride: tl.tensor,
    mask_words: tl.tensor,
    KIND: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> None:
    """One kind of entries of one row; a token occurs once."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts + row + 1)
    for start in range(tl.load(starts + row), end, ENTRIES):
        entries = start + tl.arange(0, ENTRIES)
        valid = entries < end
        tokens = tl.load(token_ids + entries, mask=valid, other=0)
        target = edited + row * size + tokens
        if KIND == ALLOWED:
            z = tl.load(logits + row * logits_stride + tokens, mask=valid, other=0.0)
            if HAS_MASK:
                z = tl.where(is_permitted(mask_rows, bits, row, tokens, valid, mask_words), z, float("-inf"))
        elif KIND == BANNED:
            z = tl.full([ENTRIES], float("-inf"), tl.float32)
        else:
            z = tl.load(target, mask=valid, other=0.0)
            if KIND == BIAS:
                z += tl.load(values + entries, mask=valid, other=0.0)
            else:
                counts = tl.load(values + entries, mask=valid, other=0).to(tl.float32)
                repetition = tl.full([ENTRIES], 0.0, tl.float32) + tl.load(factors + row)
                z = tl.where(z > 0, tl.div_rn(z, repetition), z * repetition)
                z -= tl.load(factors + 2 * num_rows + row) * counts
                z -= tl.where(counts > 0, tl.load(factors + num_rows + row), 0.0)
        tl.store(target, z, mask=valid)
