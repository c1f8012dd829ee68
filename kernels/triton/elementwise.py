"""Activations and other operations on each element alone: read once, computed in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.interface import Activation
from kernels.triton.device import narrow, sigmoid, tanh

_BLOCK = 1024


@triton.jit
def _activate(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "silu":
        return x * sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh u) / 2 = σ(2u)
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return tl.where(x > 0, x, x * 0.0)  # keeps a NaN


@triton.jit
def gated_activation_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    in_stride: tl.tensor,
    out_stride: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (rows, blocks of columns)."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = gate_up + row * in_stride + columns
    gate = tl.load(source, mask=columns < width, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=columns < width, other=0.0).to(tl.float32)
    product = _activate(gate, ACTIVATION) * up
    tl.store(out + row * out_stride + columns, narrow(product, out.dtype.element_ty), mask=columns < width)


@triton.jit
def activation_kernel(
    x: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    in_stride: tl.tensor,
    out_stride: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * in_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    activated = narrow(_activate(values, ACTIVATION), out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, activated, mask=columns < width)


@triton.jit
def soft_cap_kernel(x: tl.tensor, width: tl.tensor, stride: tl.tensor, cap: tl.tensor, BLOCK: tl.constexpr) -> None:
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = x + row * stride + columns
    values = tl.load(places, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(places, narrow(cap * tanh(values / cap), x.dtype.element_ty), mask=columns < width)


@triton.jit
def add_gated_kernel(
    x: tl.tensor,
    y: tl.tensor,
    gate: tl.tensor,  # float32, one a row
    width: tl.tensor,
    x_stride: tl.tensor,
    y_stride: tl.tensor,
    gate_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = x + row * x_stride + columns
    added = tl.load(y + row * y_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    total = tl.load(places, mask=columns < width, other=0.0).to(tl.float32)
    total += sigmoid(tl.load(gate + row * gate_stride)) * added
    tl.store(places, narrow(total, x.dtype.element_ty), mask=columns < width)


def gated_activation(gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
    """As KernelSet.gated_activation."""
    width = out.shape[-1]
    num_rows = out.numel() // max(1, width)
    if num_rows:
        gated_activation_kernel[_grid(num_rows, width)](
            gate_up, out, width, gate_up.stride(-2), out.stride(-2), ACTIVATION=activation.value, BLOCK=_BLOCK
        )


def activate(x: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
    """As KernelSet.activation. [T, I]."""
    num_rows, width = x.shape
    if num_rows:
        activation_kernel[_grid(num_rows, width)](
            x, out, width, x.stride(0), out.stride(0), ACTIVATION=activation.value, BLOCK=_BLOCK
        )


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """As KernelSet.soft_cap. [R, V]."""
    num_rows, width = x.shape
    if num_rows:
        soft_cap_kernel[_grid(num_rows, width)](x, width, x.stride(0), cap, BLOCK=_BLOCK)


def add_gated(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> None:
    """As KernelSet.add_gated."""
    num_rows, width = x.shape
    if num_rows:
        add_gated_kernel[_grid(num_rows, width)](
            x, y, gate, width, x.stride(0), y.stride(0), gate.stride(0), BLOCK=_BLOCK
        )


def _grid(num_rows: int, width: int) -> tuple[int, int]:
    return num_rows, triton.cdiv(width, _BLOCK)
