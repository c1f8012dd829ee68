"""Weights as the GPU has them: codes where a format is kept, the compute type otherwise; a launch for each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import HostWeight
from kernels.reference import linear as plain
from kernels.reference.arrays import from_host
from kernels.reference.linear import LinearWeight
from kernels.triton import quantized_weights
from kernels.triton.invariant_linear import invariant_linear
from kernels.triton.quantized_linear import quantized_embedding, quantized_linear
from kernels.triton.quantized_weights import FORMATS, QuantizedFormat, QuantizedWeight
from kernels.triton.rows import gather_rows


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs [first, last) of a weight, kept alike."""

    first: int
    last: int
    weight: QuantizedWeight | LinearWeight
    bias: torch.Tensor | None  # float32 [last − first], of codes


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [N, K] in parts that lie side by side."""

    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(_num_bytes(part) for part in self.parts)


def _num_bytes(part: Part) -> int:
    bias_bytes = 0 if part.bias is None else part.bias.nbytes
    if isinstance(part.weight, QuantizedWeight):
        return part.weight.num_bytes + bias_bytes
    return part.weight.weight.nbytes + (0 if part.weight.bias is None else part.weight.bias.nbytes)


def pack_linear(
    host_parts: Sequence[HostWeight], bias: npt.NDArray[np.float32] | None, dtype: torch.dtype, device: torch.device
) -> PackedLinear:
    """Neighbours of one format become one part."""
    parts: list[Part] = []
    first = 0
    for kind, neighbours in groupby(host_parts, _kept_as):
        members = list(neighbours)
        last = first + sum(member.rows for member in members)
        part_bias = None if bias is None else bias[first:last]
        if kind is None:
            parts.append(Part(first, last, plain.pack_linear(members, part_bias, dtype, device), None))
        else:
            device_bias = None if part_bias is None else from_host(part_bias).to(device=device, dtype=torch.float32)
            parts.append(Part(first, last, quantized_weights.pack(members, device), device_bias))
        first = last
    return PackedLinear(tuple(parts))


def _kept_as(part: HostWeight) -> QuantizedFormat | None:
    return FORMATS.get(part.format)


def linear(x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, batch_invariant: bool) -> None:
    """out [T, N] = x [T, K] · Wᵀ + bias."""
    for part in weight.parts:
        here = out[:, part.first : part.last]
        if isinstance(part.weight, QuantizedWeight):
            quantized_linear(x, part.weight, part.bias, here, batch_invariant)
        elif batch_invariant:
            invariant_linear(x, part.weight.weight, part.weight.bias, here)
        elif x.is_cuda and here.dtype is torch.float32 and x.dtype is not torch.float32:
            _wide(x, part.weight, here)
        else:
            plain.linear(x, part.weight, here)


def _wide(x: torch.Tensor, weight: LinearWeight, out: torch.Tensor) -> None:
    """The library's float32 sums as they are, where plain.linear() would round them to the compute type."""
    out.copy_(torch.mm(x, weight.transposed, out_dtype=torch.float32))
    if weight.bias is not None:
        out.add_(weight.bias)


def embedding(token_ids: torch.Tensor, weight: PackedLinear, out: torch.Tensor, scale: float, accumulate: bool) -> None:
    """out [T, H] = scale · rows of the weight, or that added to out."""
    if len(weight.parts) == 1:
        _rows(token_ids, weight.parts[0], out, scale, accumulate)
        return
    total = torch.zeros_like(out)
    for part in weight.parts:
        inside = (token_ids >= part.first) & (token_ids < part.last)
        rows = torch.empty_like(out)
        _rows((token_ids - part.first).clamp(0, part.last - part.first - 1), part, rows, scale, False)
        total = torch.where(inside[:, None], rows, total)
    if accumulate:
        out.add_(total)
    else:
        out.copy_(total)


def _rows(token_ids: torch.Tensor, part: Part, out: torch.Tensor, scale: float, accumulate: bool) -> None:
    if isinstance(part.weight, QuantizedWeight):
        quantized_embedding(token_ids, part.weight, out, scale, accumulate)
    else:
        gather_rows(part.weight.weight, token_ids, out, scale, accumulate)
