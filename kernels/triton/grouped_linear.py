"""Products of tokens with the experts they were given to: one launch for all experts, nothing read back on the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.device import dot

_FEW_ROWS, _MANY_ROWS, _OUTPUTS, _INPUTS = 16, 64, 64, 64


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, out: torch.Tensor, batch_invariant: bool
) -> None:
    """out [T, k, N] = x · W[expert]ᵀ, summed in float32; x [T, K] or [T, k, K], weight [E, N, K], expert_ids [T, k].

    Rows are sorted by expert. A tile holds rows of one expert; as many tiles are launched as there could be.
    """
    num_experts, num_outputs, num_inputs = weight.shape
    num_rows = expert_ids.numel()
    if num_rows == 0:
        return
    choices = expert_ids.shape[1]
    sorted_ids, order = torch.sort(expert_ids.reshape(-1), stable=True)
    experts = torch.arange(num_experts + 1, dtype=sorted_ids.dtype, device=sorted_ids.device)
    starts = torch.searchsorted(sorted_ids, experts, out_int32=True)
    per_choice = x.dim() == 3
    rows = x.reshape(num_rows, num_inputs) if per_choice else x
    many = not batch_invariant and num_rows > _FEW_ROWS * num_experts
    block = _MANY_ROWS if many else _FEW_ROWS
    most_tiles = num_rows // block + min(num_experts, num_rows)
    grouped_linear_kernel[(triton.cdiv(num_outputs, _OUTPUTS), most_tiles)](
        rows,
        weight,
        order,
        starts,
        out.view(num_rows, num_outputs),
        num_outputs,
        num_inputs,
        rows.stride(0),
        weight.stride(0),
        weight.stride(1),
        1 if per_choice else choices,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_M=block,
        BLOCK_N=_OUTPUTS,
        BLOCK_K=_INPUTS,
        num_warps=4,
        num_stages=2 if x.element_size() == 4 else 4,
    )


@triton.jit
def grouped_linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    expert_stride: tl.tensor,
    weight_stride: tl.tensor,
    rows_per_input: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program per tile of outputs and tile of sorted rows; order int64 [rows], starts int32 [E + 1]."""
    tile = tl.program_id(1)
    ids = tl.arange(0, EXPERTS)
    known = ids < NUM_EXPERTS
    first_rows = tl.load(starts + ids, mask=known, other=0)
    counts = tl.load(starts + ids + 1, mask=known, other=0) - first_rows
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    if expert < NUM_EXPERTS:
        here = ids == expert
        within = (tile - tl.sum(tl.where(here, ends - tiles, 0), axis=0)) * BLOCK_M + tl.arange(0, BLOCK_M)
        m_mask = within < tl.sum(tl.where(here, counts, 0), axis=0)
        row = tl.load(order + tl.sum(tl.where(here, first_rows, 0), axis=0) + within, mask=m_mask, other=0)
        n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        n_mask = n < num_outputs
        x_rows = x + (row // rows_per_input)[:, None] * x_stride
        weight_rows = weight + expert.to(tl.int64) * expert_stride + n[None, :] * weight_stride
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(num_inputs, BLOCK_K)):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            k_mask = k < num_inputs
            x_tile = tl.load(x_rows + k[None, :], mask=m_mask[:, None] & k_mask[None, :], other=0.0)
            weight_tile = tl.load(weight_rows + k[:, None], mask=n_mask[None, :] & k_mask[:, None], other=0.0)
            acc = dot(x_tile, weight_tile, acc)
        target = out + row[:, None] * num_outputs + n[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :])
