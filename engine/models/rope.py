"""Rotary position embeddings: which angle each pair of a head turns by at each position.

Angles are computed in float64 from integer positions and stored as float32 tables. A table depends on nothing but the
configuration and the number of positions served, so that a cached key is right for every sequence that shares it:
scalings that change with the length ("dynamic", "longrope") take the length the model is served with, never the
length that a sequence happens to have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every angle is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware scaling: beyond `trained_positions` the base grows with the served length."""

    factor: float
    trained_positions: int


@dataclass(frozen=True, slots=True)
class BandScaling:
    """Low frequencies are divided by `factor`, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp from extrapolation to interpolation over the dimensions.

    `attention_factor` multiplies cosines and sines.
    """

    factor: float
    trained_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (https://arxiv.org/abs/2402.13753): a divisor per pair, one list for served lengths within
    `trained_positions`, one for longer ones; `attention_factor` multiplies cosines and sines in both."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    trained_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class DivisorScaling:
    """A divisor per pair, as GGUF files carry it in the tensor `rope_freqs`."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | DynamicScaling | BandScaling | YarnScaling | LongRopeScaling | DivisorScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotation of the first `rotary_dim` of each head (even). Pairs are (i, i + rotary_dim/2), or (2i, 2i + 1)
    when interleaved."""

    base: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    interleaved: bool = False


def cos_sin_table(rope: RopeConfig, num_positions: int) -> npt.NDArray[np.float32]:
    """Cosines beside sines, [num_positions, rotary_dim], for a model served with contexts of `num_positions`."""
    angles = np.arange(num_positions)[:, None] * inverse_frequencies(rope, num_positions)
    factor = attention_factor(rope.scaling)
    return np.concatenate((np.cos(angles) * factor, np.sin(angles) * factor), axis=1).astype(np.float32)


def inverse_frequencies(rope: RopeConfig, num_positions: int) -> Float64s:
    """Radians per position of each pair, [rotary_dim / 2]."""
    exponents: Float64s = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
    plain: Float64s = np.power(rope.base, -exponents)
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case DynamicScaling(factor=factor, trained_positions=trained):
            stretch = factor * max(num_positions, trained) / trained - (factor - 1)
            base = rope.base * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
            grown: Float64s = np.power(base, -exponents)
            return grown
        case BandScaling() as scaling:
            return _banded(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, rope, scaling)
        case LongRopeScaling() as scaling:
            is_long = num_positions > scaling.trained_positions
            return _divided(plain, scaling.long_factors if is_long else scaling.short_factors)
        case DivisorScaling(divisors=divisors):
            return _divided(plain, divisors)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cosines and sines are multiplied by."""
    return scaling.attention_factor if isinstance(scaling, YarnScaling | LongRopeScaling) else 1.0


def _divided(plain: Float64s, divisors: tuple[float, ...]) -> Float64s:
    divided: Float64s = plain / np.array(divisors, np.float64)
    return divided


def _banded(plain: Float64s, scaling: BandScaling) -> Float64s:
    turns = scaling.trained_positions * plain / (2 * math.pi)  # full turns within the trained context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)  # 0: a low frequency, interpolated; 1: a high one, kept
    blended: Float64s = (1 - blend) * plain / scaling.factor + blend * plain
    return blended


def _yarn(plain: Float64s, rope: RopeConfig, scaling: YarnScaling) -> Float64s:
    def pair_turning(turns: float) -> float:
        """The (fractional) pair that makes so many turns within the trained context."""
        wavelength_ratio = scaling.trained_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength_ratio) / (2 * math.log(rope.base))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    mixed: Float64s = plain * (1 - ramp) + plain / scaling.factor * ramp
    return mixed
