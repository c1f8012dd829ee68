"""What all kernels share: arithmetic that is the same on a GPU and in the interpreter.

Kernels are written for exactness first: sums in float32, sequences of operations that do not depend on the batch. Tile
sizes come from tables, never from a tuner: a tuner needs a GPU, and its choice could change the results.

In signatures tl.tensor stands for what the kernel's author must know from the comment: a pointer to an array's first
element, a number that is the same for all programs, or a block of values.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton 3.10 turns multiply-adds off unless told; 3.9 warns of it at the first kernel.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + a · b, float32 sums. The interpreter multiplies 16-bit operands wrongly: there they are widened first."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def operand(x: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Codes or values for a dot with a tile of TYPE. The interpreter makes no bfloat16 of whole numbers: it widens."""
    if INTERPRETED:
        return x.to(tl.float32)
    return x.to(TYPE)


@triton.jit
def narrow(x: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """float32 x as TYPE, rounded to nearest even. The interpreter cuts bfloat16's bits off: there they go before."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)
    return x.to(TYPE)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """To float32's precision, relative to the result: near 0 by its series, where 1 − e^(−2x) would cancel."""
    square = x * x
    series = x * (1.0 + square * (-0.33333333 + square * (0.13333333 - square * 0.053968254)))
    decay = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.1, series, tl.where(x < 0, -magnitude, magnitude))


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + e^(−x)), without overflow."""
    decay = tl.exp(-tl.abs(x))
    return tl.where(x < 0, decay, 1.0) / (1.0 + decay)


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """2^exponent for whole exponents ≤ 127, exactly; 0 below the normal numbers, and for −inf and NaN."""
    clamped = tl.where(exponent > -127.0, exponent, -127.0).to(tl.int32)
    return ((clamped + 127) << 23).to(tl.float32, bitcast=True)


def power_of_two_at_least(number: int) -> int:
    """The smallest power of two ≥ number ≥ 1: blocks have such sizes."""
    return 1 << (number - 1).bit_length()
