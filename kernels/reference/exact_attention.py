"""The arithmetic of the native kernels' attention over 8-bit caches, step by step in numpy: equal to them bit for bit.

A key's score is the sum of query · codes times the key's scale; a value enters as codes, its weight times the value's
scale. Keys are taken in partitions of 256 lanes (a block takes its size, rounded up to 16), each with a maximum and
sums of its own, which are merged in order.

On vectors everything is float32: even and odd elements summed apart by fused multiply-adds, then added. On tiles (AMX)
queries and weights are rounded to bf16 and summed as in `tiles`; codes are exact in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.interface import AttentionSpec
from kernels.reference.quantized import Floats, fma
from kernels.reference.tiles import bf16, flushed, tile_step

_LANES = 16
_PARTITION_LANES = 256
_TILE_STEP = 32  # elements that a tile product takes at once
_HIDDEN = np.float32(-1e30)
_LOG2_E = np.float32(1.44269504)
_ROUNDING = np.float32(12582912.0)  # 1.5 · 2^23: a sum with it is rounded to an integer


@dataclass(frozen=True, slots=True)
class Vectors:
    """Keys or values of one KV head as an 8-bit cache holds them: codes [n, D] and scales [n]."""

    codes: Floats
    scales: Floats


def quantize(x: Floats) -> Vectors:
    """x [n, D], a scale a vector: absmax / 127."""
    top = np.abs(x).max(axis=-1)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    return Vectors(np.rint(x * inverse[:, None]), top / np.float32(127))


def attend(
    q: Floats,
    positions: npt.NDArray[np.int32],
    keys: Vectors,
    values: Vectors,
    spec: AttentionSpec,
    block_size: int,
    on_tiles: bool,
) -> Floats:
    """Rows q [R, D] of heads that use this KV head, at absolute positions [R], over all keys → [R, Dv]."""
    num_keys = len(keys.codes)
    key = np.arange(num_keys)
    seen = key <= positions[:, None]
    if spec.window is not None:
        seen &= key > positions[:, None] - spec.window
    lanes = -(-block_size // _LANES) * _LANES
    lane = key // block_size * lanes + key % block_size
    scores = _scores_on_tiles(q, keys, spec) if on_tiles else _scores(q, keys, spec)
    state = _State(len(q), values.codes.shape[1])
    partition = lane // (_PARTITION_LANES // lanes * lanes)
    for index in range(int(partition[-1]) + 1):
        here = partition == index
        part = Vectors(values.codes[here], values.scales[here])
        weigh = _weigh_on_tiles if on_tiles else _weigh
        first = lane[here][0]
        state.merge(*weigh(scores[:, here], seen[:, here], part, lane[here] - first, key[here] % block_size))
    return state.finish()


class _State:
    """Of R rows: weighted values, maximum and sum so far."""

    def __init__(self, rows: int, width: int) -> None:
        self._values = np.zeros((rows, width), np.float32)
        self._top = np.full(rows, _HIDDEN)
        self._sum = np.zeros(rows, np.float32)

    def merge(self, values: Floats, top: Floats, total: Floats) -> None:
        new_top = np.maximum(self._top, top)
        keep, take = exp(self._top - new_top), exp(top - new_top)
        self._values = fma(values, take[:, None], self._values * keep[:, None])
        self._sum = fma(total, take, self._sum * keep)
        self._top = new_top

    def finish(self) -> Floats:
        inverse = np.divide(np.float32(1), self._sum, out=np.zeros_like(self._sum), where=self._sum > 0)
        return self._values * inverse[:, None]


# -- on vectors -----------------------------------------------------------------------------------------------------


def _scores(q: Floats, keys: Vectors, spec: AttentionSpec) -> Floats:
    sums = [np.zeros((len(q), len(keys.codes)), np.float32) for _ in range(2)]
    for i in range(q.shape[1]):
        sums[i % 2] = fma(q[:, i, None], keys.codes[None, :, i], sums[i % 2])
    return _capped((sums[0] + sums[1]) * keys.scales * np.float32(spec.scale), spec)


def _weigh(
    scores: Floats, seen: npt.NDArray[np.bool_], values: Vectors, lane: npt.NDArray[np.int64], offset: npt.NDArray[Any]
) -> tuple[Floats, Floats, Floats]:
    """Weighted values, maximum and sum of a partition; `offset` says where in its block each key stands."""
    top = np.where(seen, scores, _HIDDEN).max(axis=1)
    weights = np.where(seen, exp(scores - top[:, None]), np.float32(0))
    total = _sum_of_lanes(_in_lanes(weights, lane))
    scaled = np.where(weights > 0, weights * values.scales, np.float32(0))
    sums = [np.zeros((len(scores), values.codes.shape[1]), np.float32) for _ in range(2)]
    for i in range(len(lane)):
        parity = offset[i] % 2
        sums[parity] = fma(scaled[:, i, None], values.codes[None, i], sums[parity])
    return sums[0] + sums[1], top, total


def _in_lanes(x: Floats, lane: npt.NDArray[np.int64]) -> Floats:
    """[R, n] → [R, vectors, 16], zeros where no key stands."""
    spread = np.zeros((len(x), _PARTITION_LANES), np.float32)
    spread[:, lane] = x
    return spread.reshape(len(x), -1, _LANES)


def _sum_of_lanes(x: Floats) -> Floats:
    """[R, vectors, 16]: vectors one after the other, then lanes i and i + 8, + 4, + 2, + 1."""
    total = np.zeros((len(x), _LANES), np.float32)
    for vector in range(x.shape[1]):
        total = total + x[:, vector]
    return _reduce(total)


def _reduce(total: Floats) -> Floats:
    for width in (8, 4, 2, 1):
        total = total[:, :width] + total[:, width : 2 * width]
    return total[:, 0]


# -- on tiles -------------------------------------------------------------------------------------------------------


def _scores_on_tiles(q: Floats, keys: Vectors, spec: AttentionSpec) -> Floats:
    rows, codes = _padded(bf16(q)), _padded(keys.codes)
    total = np.zeros((len(q), len(codes)), np.float32)
    for first in range(0, rows.shape[1], _TILE_STEP):
        total = tile_step(rows[:, first : first + _TILE_STEP], codes[:, first : first + _TILE_STEP], total)
    return _capped(total * np.float32(spec.scale) * keys.scales, spec)


def _weigh_on_tiles(
    scores: Floats, seen: npt.NDArray[np.bool_], values: Vectors, lane: npt.NDArray[np.int64], offset: npt.NDArray[Any]
) -> tuple[Floats, Floats, Floats]:
    """As _weigh."""
    top = np.where(seen, scores, _HIDDEN).max(axis=1)
    exponents = fma(scores, np.broadcast_to(_LOG2_E, scores.shape), -(top * _LOG2_E)[:, None])
    weights = np.where(seen, exp2(exponents), np.float32(0))
    vectors = _in_lanes(weights, lane)
    sums = [np.zeros((len(scores), _LANES), np.float32) for _ in range(2)]
    for vector in range(vectors.shape[1]):
        sums[vector % 2] = sums[vector % 2] + vectors[:, vector]
    scaled = bf16(flushed(np.where(seen, weights * values.scales, np.float32(0))))
    spread = _in_lanes(scaled, lane).reshape(len(scores), -1)
    codes = np.zeros((spread.shape[1], values.codes.shape[1]), np.float32)
    codes[lane] = values.codes
    total = np.zeros((len(scores), values.codes.shape[1]), np.float32)
    for first in range(0, spread.shape[1], _TILE_STEP):
        total = tile_step(spread[:, first : first + _TILE_STEP], codes[first : first + _TILE_STEP].T, total)
    return total, top, _reduce(sums[0] + sums[1])


def _padded(x: Floats) -> Floats:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % _TILE_STEP)))


# -- elementary functions -------------------------------------------------------------------------------------------


def _capped(scores: Floats, spec: AttentionSpec) -> Floats:
    if spec.soft_cap is None:
        return scores
    cap = np.float32(spec.soft_cap)
    return cap * tanh(scores / cap)


def exp(x: Floats) -> Floats:
    """kernels/native/src/isa/math.h."""
    lowest = np.float32(-87.3)
    clamped = np.minimum(np.float32(88.7), np.maximum(lowest, x))
    n = np.rint(clamped * _LOG2_E)
    r = _fma(n, -0.693359375, clamped)
    r = _fma(n, 2.12194440e-4, r)
    p = np.full_like(r, np.float32(1) / np.float32(5040))
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        p = fma(p, r, np.broadcast_to(np.float32(1) / np.float32(divisor), r.shape))
    half = n.astype(np.int32) >> 1
    scale, rest = np.ldexp(np.float32(1), half), np.ldexp(np.float32(1), n.astype(np.int32) - half)
    return np.where(x < lowest, np.float32(0), p * scale * rest).astype(np.float32)


def tanh(x: Floats) -> Floats:
    """kernels/native/src/isa/math.h."""
    magnitude, square = np.abs(x), x * x
    p = np.full_like(x, np.float32(62) / np.float32(2835))
    for numerator, divisor in ((-17, 315), (2, 15), (-1, 3)):
        p = fma(p, square, np.broadcast_to(np.float32(numerator) / np.float32(divisor), x.shape))
    small = fma(p * square, x, x)
    large = np.float32(1) - np.float32(2) / (exp(magnitude + magnitude) + np.float32(1))
    return np.where(magnitude < np.float32(0.18), small, np.where(x < 0, -large, large))


def exp2(x: Floats) -> Floats:
    """2^x as kernels/native/src/isa/amx_attention.h has it; 2^−126 at the least."""
    x = np.maximum(np.float32(-126), x)
    shifted = x + _ROUNDING
    r = x - (shifted - _ROUNDING)
    p = np.full_like(r, np.float32(0.055088684))
    for coefficient in (0.242604047, 0.693276227, 0.999928951):
        p = fma(p, r, np.broadcast_to(np.float32(coefficient), r.shape))
    return (p.view(np.int32) + (shifted.view(np.int32) << 23)).view(np.float32)


def _fma(a: Floats, factor: float, c: Floats) -> Floats:
    return fma(a, np.broadcast_to(np.float32(factor), a.shape), c)
