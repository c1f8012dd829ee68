"""Philox4x32-10, the counter-based generator behind every draw.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), the Random123 paper.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_CHUNK = 16384  # counters at a time on the host: the work arrays stay in the core's cache

Words = Any  # numpy uint64 or torch int64 arrays that broadcast, a 32-bit word in each element


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """The four output words of each counter, as arrays of the kind that came in."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0  # wraps as int64; the masks make shifts logical again
        product_1 = c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((product_0 >> 32) & _MASK) ^ c3 ^ k1
        c1 = product_1 & _MASK
        c3 = product_0 & _MASK
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def gumbel(token_ids: torch.Tensor, seed: int, output_position: int, choice_index: int, purpose: int) -> torch.Tensor:
    """float32 noise −log(−log((x + 0.5)·2⁻³²)) per token id [n], x the first output word; computed in float64."""
    key = (seed & _MASK, seed >> 32)
    tail = (output_position, choice_index, purpose)
    if token_ids.device.type == "cpu":
        words = torch.from_numpy(_host_words(token_ids.numpy(), key, tail))
    else:
        constants = [torch.full_like(token_ids, word) for word in tail]
        words = philox((token_ids, constants[0], constants[1], constants[2]), key)[0]
    uniform = (words.double() + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_().float()


def _host_words(
    token_ids: npt.NDArray[np.int64], key: tuple[int, int], tail: tuple[int, int, int]
) -> npt.NDArray[np.int64]:
    words = np.empty(token_ids.shape, np.int64)
    for start in range(0, len(words), _CHUNK):
        first = token_ids[start : start + _CHUNK].astype(np.uint64)
        constants = [np.full(1, word, np.uint64) for word in tail]
        words[start : start + _CHUNK] = philox((first, constants[0], constants[1], constants[2]), key)[0]
    return words
