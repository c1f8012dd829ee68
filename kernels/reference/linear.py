"""Weights and products: linear, embedding, experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.formats import dequantize
from kernels.interface import HostWeight
from kernels.reference.arrays import from_host

_DEQUANTIZED_AT_ONCE = 1 << 22  # elements: bounds the float32 copy that packing a large matrix needs


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """`weight` [N, K] (or [E, N, K]) and `bias` [N] in the compute type; `transposed` is a view of the weight."""

    weight: torch.Tensor
    transposed: torch.Tensor
    bias: torch.Tensor | None


def pack_linear(
    parts: Sequence[HostWeight], bias: npt.NDArray[np.float32] | None, dtype: torch.dtype, device: torch.device
) -> LinearWeight:
    """The parts stacked along the outputs, dequantised to the compute type."""
    weight = _stack(parts, dtype, device)
    packed_bias = None if bias is None else from_host(bias).to(device=device, dtype=dtype)
    return LinearWeight(weight, weight.t(), packed_bias)


def pack_experts(experts: Sequence[Sequence[HostWeight]], dtype: torch.dtype, device: torch.device) -> LinearWeight:
    """Per expert its parts stacked: [E, N, K]."""
    weight = torch.stack([_stack(parts, dtype, device) for parts in experts])
    return LinearWeight(weight, weight.transpose(1, 2), None)


def _stack(parts: Sequence[HostWeight], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    num_rows = sum(part.rows for part in parts)
    stacked = torch.empty((num_rows, parts[0].columns), dtype=dtype, device=device)
    start = 0
    for part in parts:
        rows_at_once = max(1, _DEQUANTIZED_AT_ONCE // part.columns)
        for first in range(0, part.rows, rows_at_once):
            last = min(part.rows, first + rows_at_once)
            stacked[start + first : start + last].copy_(from_host(dequantize(part, first, last)))
        start += part.rows
    return stacked


def linear(x: torch.Tensor, weight: LinearWeight, out: torch.Tensor) -> None:
    """out = x · Wᵀ + bias, summed by the library in float32; a wider `out` gets the rounded result."""
    num_tokens = x.shape[0]
    if num_tokens == 0:
        return
    target = out
    if out.dtype != weight.weight.dtype:
        target = torch.empty(out.shape, dtype=weight.weight.dtype, device=out.device)
    if num_tokens == 1:
        torch.mv(weight.weight, x[0], out=target[0])
        if weight.bias is not None:
            target.add_(weight.bias)
    elif weight.bias is None:
        torch.mm(x, weight.transposed, out=target)
    else:
        torch.addmm(weight.bias, x, weight.transposed, out=target)
    if target is not out:
        out.copy_(target)


def embedding(token_ids: torch.Tensor, weight: LinearWeight, out: torch.Tensor, scale: float, accumulate: bool) -> None:
    """out = scale · rows of the table, or that added to out."""
    if accumulate:
        out.add_(weight.weight.index_select(0, token_ids), alpha=scale)
        return
    torch.index_select(weight.weight, 0, token_ids, out=out)
    if scale != 1.0:
        out.mul_(scale)


def route_experts(
    logits: torch.Tensor, top_k: int, normalize: bool, expert_ids: torch.Tensor, expert_weights: torch.Tensor
) -> None:
    """Softmax, then the top_k by weight; a stable sort gives ties to the lowest id."""
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    values, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    values = values[:, :top_k]
    if normalize:
        values = values / values.sum(dim=-1, keepdim=True)
    expert_ids.copy_(order[:, :top_k])
    expert_weights.copy_(values)


def grouped_linear(x: torch.Tensor, weight: LinearWeight, expert_ids: torch.Tensor, out: torch.Tensor) -> None:
    """One product per expert that has rows; row t·k + j is choice j of token t."""
    num_tokens, top_k = expert_ids.shape
    if num_tokens == 0:
        return
    flat_ids = expert_ids.reshape(-1)
    order = torch.argsort(flat_ids, stable=True)
    counts = torch.bincount(flat_ids, minlength=weight.weight.shape[0]).tolist()
    sources = order if x.dim() == 3 else order.div(top_k, rounding_mode="floor")
    inputs = (x.flatten(0, 1) if x.dim() == 3 else x).index_select(0, sources)
    products = torch.empty((num_tokens * top_k, out.shape[-1]), dtype=weight.weight.dtype, device=out.device)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            torch.mm(inputs[start : start + count], weight.transposed[expert], out=products[start : start + count])
            start += count
    out.view(num_tokens * top_k, -1).index_copy_(0, order, products.to(out.dtype))


def combine_experts(y: torch.Tensor, expert_weights: torch.Tensor, out: torch.Tensor) -> None:
    """The weighted sum over the choices in float32, in order of choice."""
    total = y[:, 0].float() * expert_weights[:, 0:1]
    for choice in range(1, y.shape[1]):
        total += y[:, choice].float() * expert_weights[:, choice : choice + 1]
    out.copy_(total)
