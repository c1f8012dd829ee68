"""The arithmetic of the native kernels' products on AMX tiles, step by step in numpy: equal to them bit for bit.

Weights with codes become w = bf16(fp16(d·2^e · code + m·2^e)) · 2^−112, where fp16 is rounded to nearest even and bf16
by adding half a unit to the magnitude; activations x · 2^(112 − e) are rounded to bf16. Plain weights and their
activations are rounded to bf16 as they are. The tile instruction (TDPBF16PS) then takes 32 inputs at a time: even and
odd ones are summed apart, each by a chain of fused multiply-adds, both are added, and that to the total; all in float32
rounded to nearest even, denormals counting as zero.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernels import formats
from kernels.interface import HostWeight
from kernels.reference.quantized import GROUP, Floats, fma, unpack

_SMALLEST = np.float32(2.0**-126)
_FP16_TOP = 15  # 2^15 is the top of fp16


def linear(x: Floats, part: HostWeight, bias: Floats | None = None) -> Floats:
    """x [rows, K] · Wᵀ + bias → [rows, N]."""
    weights, exponent = expand(part)
    scale = np.float32(1.0) if exponent is None else np.float32(2.0 ** (112 - exponent))
    activations = bf16(_padded(x * scale))
    total = np.zeros((len(x), part.rows), np.float32)
    for start in range(0, activations.shape[1], GROUP):
        total = tile_step(activations[:, start : start + GROUP], weights[:, start : start + GROUP], total)
    return total if bias is None else total + bias


def expand(part: HostWeight) -> tuple[Floats, int | None]:
    """The weights [N, K padded] as they stand in a tile, and the exponent e of formats with codes."""
    if part.format in formats.PLAIN:
        return _padded(bf16(formats.dequantize(part))), None
    codes, scales, minima = unpack(part)
    exponent = _exponent(part, scales, minima)
    power = np.float32(2.0**exponent)
    d = (scales * power).astype(np.float16).astype(np.float64)[..., None]
    if minima is not None:
        value = d * codes + (minima * power).astype(np.float16).astype(np.float64)[..., None]
    else:
        value = d * codes
    halves = value.astype(np.float16).view(np.int16).astype(np.int32)
    rounded = ((halves + 4).astype(np.int16) >> 3) & np.int16(-0x7001)
    bits = rounded.astype(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(part.rows, -1), exponent


def _exponent(part: HostWeight, scales: Floats, minima: Floats | None) -> int:
    """e such that 2^e times the largest weight that the format could hold lies below 2^15."""
    largest_code = 128.0 if part.format in ("Q8_0", "INT8") else 15.0
    bounds = np.abs(scales) * np.float32(largest_code)
    if minima is not None:
        bounds = bounds + np.abs(minima)
    largest = float(bounds.max(initial=0.0))
    if largest == 0.0:
        return 0
    return min(15, max(-14, _FP16_TOP - int(np.frexp(largest)[1])))


def tile_step(x: Floats, weights: Floats, total: Floats) -> Floats:
    """One instruction: total [rows, N] + x [rows, 32] · weights [N, 32]ᵀ, all of them values that bf16 holds."""
    sums = [np.zeros_like(total), np.zeros_like(total)]
    for k in range(0, GROUP, 2):
        for odd in (0, 1):
            a = flushed(x[:, k + odd, None])
            b = flushed(weights[None, :, k + odd])
            sums[odd] = flushed(fma(a, b, sums[odd]))
    return flushed(total + flushed(sums[0] + sums[1]))


def flushed(values: Floats) -> Floats:
    """Denormals become zero."""
    return np.where(np.abs(values) < _SMALLEST, np.float32(0.0), values).astype(np.float32)


def bf16(values: Floats) -> Floats:
    """Rounded to bf16, to nearest even."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def _padded(values: npt.NDArray[np.float32]) -> Floats:
    columns = values.shape[1]
    return np.pad(values, ((0, 0), (0, -columns % GROUP)))
