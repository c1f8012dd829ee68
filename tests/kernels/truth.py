"""The operations of kernels.interface as plain formulas in float64: what every backend is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.interface import Activation, RopeSpec

Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]

_erf = np.vectorize(math.erf)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Doubles:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight, np.float64)


def layer_norm(x: Floats, weight: Floats, bias: Floats | float, eps: float) -> Doubles:
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return np.asarray(scaled * weight + bias, np.float64)


def activate(x: Floats, activation: Activation) -> Doubles:
    wide = x.astype(np.float64)
    match activation:
        case Activation.SILU:
            return np.asarray(wide / (1 + np.exp(-wide)), np.float64)
        case Activation.GELU:
            return np.asarray(0.5 * wide * (1 + _erf(wide / math.sqrt(2))), np.float64)
        case Activation.GELU_TANH:
            return np.asarray(0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))))
        case Activation.RELU:
            return np.maximum(wide, 0)


def sigmoid(x: Floats) -> Doubles:
    """Without overflow on either side."""
    return np.asarray(0.5 * (1 + np.tanh(x.astype(np.float64) / 2)))


def rope(x: Floats, positions: npt.NDArray[np.int32], cos_sin: Floats, spec: RopeSpec) -> Doubles:
    """x [T, heads, D]."""
    rotated = x.astype(np.float64)
    half = spec.rotary_dim // 2
    cos, sin = (part[:, None, :] for part in np.split(cos_sin[positions].astype(np.float64), 2, axis=-1))
    if spec.interleaved:
        first, second = slice(0, spec.rotary_dim, 2), slice(1, spec.rotary_dim, 2)
    else:
        first, second = slice(0, half), slice(half, spec.rotary_dim)
    a, b = rotated[..., first].copy(), rotated[..., second].copy()
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = b * cos + a * sin
    return rotated


def attention(q: Floats, k: Floats, v: Floats, scale: float, window: int | None, soft_cap: float | None) -> Doubles:
    """One sequence: q [n, heads, D] at the end of k [L, kv_heads, D], v [L, kv_heads, Dv]; causal."""
    num_queries, num_heads, _ = q.shape
    length, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    keys = np.repeat(k.astype(np.float64), group, axis=1)
    values = np.repeat(v.astype(np.float64), group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    query_positions = np.arange(length - num_queries, length)[:, None]
    key_positions = np.arange(length)[None, :]
    hidden = key_positions > query_positions
    if window is not None:
        hidden |= key_positions <= query_positions - window
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", weights, values), np.float64)


def softmax(x: Floats) -> Doubles:
    wide = x.astype(np.float64)
    weights = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def route_experts(logits: Floats, top_k: int, normalize: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    probabilities = softmax(logits)
    ids = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(probabilities, ids, axis=-1)
    return ids, weights / weights.sum(axis=-1, keepdims=True) if normalize else weights


def grouped_linear(x: Floats, experts: Sequence[Floats], ids: npt.NDArray[np.integer[Any]]) -> Doubles:
    """x [T, K] or [T, k, K] → [T, k, N]."""
    num_tokens, top_k = ids.shape
    rows = x if x.ndim == 3 else np.repeat(x[:, None], top_k, axis=1)
    return np.stack(
        [
            np.stack([rows[t, j].astype(np.float64) @ experts[ids[t, j]].astype(np.float64).T for j in range(top_k)])
            for t in range(num_tokens)
        ]
    )
