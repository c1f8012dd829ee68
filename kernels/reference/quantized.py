"""The arithmetic of the native kernels' quantised products, step by step in numpy: equal to them bit for bit.

Activations are quantised per row and group of 32: scale = absmax / 127, codes = round-half-even(x · (127 / absmax)).
Per group g of 32 inputs and output n, the codes' products are summed exactly; then, in float32 and in order of g,

    acc = fma(Σ codes, d[n, g] · scale[g], acc)        and, for formats with a minimum,
    acc = fma(m[n, g], scale[g] · Σ activation codes, acc)

and the bias is added last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.formats import INT4_GROUPS
from kernels.interface import HostWeight

GROUP = 32

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    codes: Integers  # [rows, groups, 32]
    scales: Floats  # [rows, groups]
    sums: Floats  # [rows, groups]: scale · Σ codes


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a · b + c, rounded once. The product is exact in float64; the sum is rounded to odd before it becomes float32
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008). Finite values."""
    product = a.astype(np.float64) * b.astype(np.float64)
    wide = c.astype(np.float64)
    total = product + wide
    back = total - product
    error = (product - (total - back)) + (wide - back)
    bits = np.atleast_1d(total).view(np.int64)
    inexact_and_even = (np.atleast_1d(error) != 0) & (bits & 1 == 0)
    away = (np.atleast_1d(error) > 0) == (np.atleast_1d(total) > 0)
    odd = np.where(inexact_and_even, np.where(away, bits + 1, bits - 1), bits)
    return odd.view(np.float64).astype(np.float32).reshape(np.broadcast_shapes(a.shape, b.shape, c.shape))


def quantize_rows(x: Floats) -> QuantizedRows:
    """x [rows, K]; K is padded with zeros to whole groups."""
    rows, columns = x.shape
    padded = np.zeros((rows, -(-columns // GROUP) * GROUP), np.float32)
    padded[:, :columns] = x
    groups = padded.reshape(rows, -1, GROUP)
    top = np.abs(groups).max(axis=-1)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    codes = np.rint(groups * inverse[..., None]).astype(np.int32)
    scales = top / np.float32(127)
    return QuantizedRows(codes, scales, scales * codes.sum(axis=-1).astype(np.float32))


def linear(x: Floats, parts: Sequence[HostWeight], bias: Floats | None = None) -> Floats:
    """x [rows, K] · Wᵀ + bias → [rows, N]; every part in a format that keeps its codes."""
    quantized = quantize_rows(x)
    out = np.concatenate([_part(quantized, part) for part in parts], axis=1)
    return out if bias is None else out + bias


def _part(x: QuantizedRows, part: HostWeight) -> Floats:
    codes, scales, minima = unpack(part)
    rows, groups = x.scales.shape
    acc = np.zeros((rows, part.rows), np.float32)
    for g in range(groups):
        dot = (x.codes[:, g] @ codes[:, g].T).astype(np.float32)  # exact: below 2^24
        acc = fma(dot, scales[:, g] * x.scales[:, g, None], acc)
        if minima is not None:
            acc = fma(minima[:, g], np.broadcast_to(x.sums[:, g, None], acc.shape), acc)
    return acc


def unpack(part: HostWeight) -> tuple[Integers, Floats, Floats | None]:
    """Codes [N, groups, 32], scales [N, groups] and minima [N, groups] of a weight, in groups of 32 inputs."""
    groups = -(-part.columns // GROUP)
    if part.format == "INT8":
        codes = np.zeros((part.rows, groups * GROUP), np.int32)
        codes[:, : part.columns] = part.data[:, 2:].view(np.int8)
        scales = np.repeat(_half(part.data[:, None, :2]), groups, axis=1)
        return codes.reshape(part.rows, groups, GROUP), scales, None
    if part.format in INT4_GROUPS:
        group = INT4_GROUPS[part.format]
        blocks = part.data.reshape(part.rows, -(-part.columns // group), -1)
        both = blocks[..., 2:]
        nibbles = np.stack((both & 15, both >> 4), axis=-1).reshape(part.rows, -1, GROUP)[:, :groups]
        scales = np.repeat(_half(blocks[..., :2]), group // GROUP, axis=1)[:, :groups]
        return (nibbles.astype(np.int32) ^ 8) - 8, scales, None
    blocks = part.data.reshape(part.rows, groups, -1)
    scales = _half(blocks[..., :2])
    match part.format:
        case "Q8_0":
            return np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.int32), scales, None
        case "Q4_0":
            return _halves(blocks[..., 2:]) - 8, scales, None
        case "Q4_1":
            return _halves(blocks[..., 4:]), scales, _half(blocks[..., 2:4])
        case _:
            raise ValueError(f"{part.format} does not keep its codes")


def _half(data: npt.NDArray[np.uint8]) -> Floats:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)[..., 0]


def _halves(both: npt.NDArray[np.uint8]) -> Integers:
    """The first 16 inputs of a group stand in the low nibbles, the others in the high ones."""
    return np.concatenate((both & 15, both >> 4), axis=-1).astype(np.int32)
