"""Cases and checks of sampling for every backend, and the contract in plain float64 and Python integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.interface import Csr, CsrValues, KernelSet, Penalties, SamplingBatch, TokenMask

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]

# counter, key, output: the known-answer vectors that come with Random123 (kat_vectors, philox4x32 10)
PHILOX_VECTORS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 as the paper writes it down, on Python's integers."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * x0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * x2, 1 << 32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return x0, x1, x2, x3


def noise(token_id: int, seed: int, output_position: int, choice_index: int) -> np.float32:
    """The Gumbel noise of one token, by KernelSet.sample's contract."""
    word = philox((token_id, output_position, choice_index, 0), (seed % (1 << 32), seed >> 32))[0]
    return np.float32(-math.log(-math.log((word + 0.5) * 2.0**-32)))


def batch(num_rows: int, **fields: Any) -> SamplingBatch:
    """Plain sampling at temperature 1 with seeds 0, 1, …; fields are per row, or one value for all."""
    dtypes = {
        "temperature": np.float32,
        "top_k": np.int32,
        "top_p": np.float32,
        "min_p": np.float32,
        "seed": np.uint64,
        "choice_index": np.int32,
        "output_position": np.int32,
    }
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": np.arange(num_rows),
        "choice_index": 0,
        "output_position": 0,
    }
    values |= fields
    arrays: dict[str, Any] = {
        name: np.broadcast_to(np.asarray(value, dtypes[name]), num_rows) for name, value in values.items()
    }
    return SamplingBatch(**arrays)


def csr(*rows: Sequence[int]) -> Csr:
    starts = np.cumsum([0, *[len(row) for row in rows]]).astype(np.int32)
    return Csr(starts, np.array([token for row in rows for token in row], np.int32))


def csr_values(*rows: dict[int, float]) -> CsrValues:
    ids = csr(*[list(row) for row in rows])
    return CsrValues(ids.row_starts, ids.token_ids, np.array([v for row in rows for v in row.values()], np.float32))


def token_mask(masks: Sequence[Sequence[int]], rows: Sequence[int], vocab_size: int = 3) -> TokenMask:
    """`masks[m]` are the tokens that may be drawn under mask m."""
    bits = np.zeros((len(masks), -(-vocab_size // 32)), np.uint32)
    for index, token_ids in enumerate(masks):
        for token_id in token_ids:
            bits[index, token_id // 32] |= np.uint32(1 << token_id % 32)
    return TokenMask(np.array(rows, np.int32), bits)


def check_masks(kernels: KernelSet) -> None:
    """Rows under a mask draw as if only its tokens had logits, by every way of drawing; the others as ever.

    The vocabulary doesn't fill its last word, masks are of none, few, most and all tokens, and one serves two rows.
    """
    num_rows, vocab_size = 48, 301
    random = np.random.default_rng(6)
    logits = (random.standard_normal((num_rows, vocab_size)) * 3).astype(np.float32)
    shares = [0.0, 0.01, 0.1, 0.5, 0.99, 1.0]
    allowed = [np.flatnonzero(random.random(vocab_size) < share) for share in shares]
    allowed.append(np.arange(64, 128))  # whole words and nothing else
    rows = random.integers(-1, len(allowed), num_rows)
    params = batch(
        num_rows,
        temperature=random.choice([0.0, 0.3, 1.0, 1.7], num_rows),
        top_k=random.choice([0, 1, 5, 50, 300], num_rows),
        top_p=random.choice([0.05, 0.5, 0.9, 1.0], num_rows),
        min_p=random.choice([0.0, 0.02, 0.3], num_rows),
        seed=random.integers(0, 2**64, num_rows, dtype=np.uint64),
    )
    params = replace(params, mask=token_mask([list(tokens) for tokens in allowed], rows.tolist(), vocab_size))
    expected = []
    for row, mask in enumerate(rows):
        masked = np.full(vocab_size, -np.inf, np.float32)
        tokens = np.arange(vocab_size) if mask < 0 else allowed[mask]
        masked[tokens] = logits[row, tokens]
        expected.append(draw(masked, params, row) if len(tokens) else -1)
    uploaded = kernels.upload(logits.copy())
    assert kernels.sample(uploaded, params).tolist() == expected
    np.testing.assert_array_equal(kernels.download(uploaded), logits)


def check_nan_under_a_mask(kernels: KernelSet) -> None:
    """A NaN is reported even where the mask would hide it."""
    logits = np.array([[1, np.nan, 2], [1, 3, 2]], np.float32)
    params = replace(batch(2, temperature=0.0), mask=token_mask([[0, 2]], [0, 0]))
    assert kernels.sample(kernels.upload(logits), params).tolist() == [-1, 2]


def survivors(logits: Floats, top_k: int, top_p: float, min_p: float, temperature: float) -> list[int]:
    """The tokens that may be drawn, by the contract, in float64."""
    z = (logits / np.float32(temperature)).astype(np.float32)
    keep = z > -np.inf
    if 0 < top_k < len(z):
        keep &= z >= np.sort(z)[-top_k]
    if top_p < 1.0:
        weights = np.exp(z[keep].astype(np.float64) - float(z.max()))
        order = np.sort(weights / weights.sum())[::-1]
        reached = np.flatnonzero(np.cumsum(order) >= np.float32(top_p))
        cutoff = np.sort(z[keep])[::-1][reached[0] if len(reached) else -1]
        keep &= z >= cutoff
    if min_p > 0.0:
        keep &= z.astype(np.float64) >= float(z.max()) + math.log(float(np.float32(min_p)))
    return np.flatnonzero(keep).tolist()


def draw(logits: Floats, params: SamplingBatch, row: int) -> int:
    """The token of one row without masks, bias and penalties."""
    temperature = params.temperature[row]
    if temperature == 0.0:
        return int(logits.argmax())
    ids = survivors(logits, int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row]), temperature)
    z = logits / temperature
    seed, position, choice = (int(field[row]) for field in (params.seed, params.output_position, params.choice_index))
    scores = [np.float32(z[i] + noise(i, seed, position, choice)) for i in ids]
    return ids[int(np.argmax(scores))]


def check_same_draws(kernels: KernelSet) -> None:
    """Every row's token is the contract's, whatever stands beside it."""
    num_rows, vocab_size = 40, 300
    random = np.random.default_rng(5)
    logits = (random.standard_normal((num_rows, vocab_size)) * 3).astype(np.float32)
    params = batch(
        num_rows,
        temperature=random.choice([0.0, 0.3, 1.0, 1.7], num_rows),
        top_k=random.choice([0, 1, 5, 50, 299, 300, 1000], num_rows),
        top_p=random.choice([0.05, 0.5, 0.9, 0.999, 1.0], num_rows),
        min_p=random.choice([0.0, 0.02, 0.3, 1.0], num_rows),
        seed=random.integers(0, 2**64, num_rows, dtype=np.uint64),
        choice_index=random.integers(0, 8, num_rows),
        output_position=random.integers(0, 2**31 - 1, num_rows),
    )
    uploaded = kernels.upload(logits.copy())
    tokens = kernels.sample(uploaded, params)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [draw(logits[row], params, row) for row in range(num_rows)]
    np.testing.assert_array_equal(kernels.download(uploaded), logits)


def chi_squared(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """How many standard deviations the statistic lies above its mean. All probabilities positive."""
    expected = probabilities * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def check_distribution(kernels: KernelSet, vary: str) -> None:
    """Draws that differ in one field of the noise's key or counter alone follow the softmax."""
    num_draws, vocab_size, temperature = 20_000, 12, 0.8
    logits = np.linspace(0.0, 2.0, vocab_size, dtype=np.float32)
    counts = np.zeros(vocab_size, np.int64)
    rows = 1000
    for start in range(0, num_draws, rows):
        fields = {"seed": 77, "output_position": 3, "choice_index": 1, vary: np.arange(start, start + rows)}
        params = batch(rows, temperature=temperature, **fields)
        tokens = kernels.sample(kernels.upload(np.tile(logits, (rows, 1))), params)
        counts += np.bincount(tokens, minlength=vocab_size)
    weights = np.exp(logits.astype(np.float64) / temperature)
    assert abs(chi_squared(counts, weights / weights.sum())) < 4.0


def check_support(kernels: KernelSet, logits: Floats, allowed: set[int], **fields: Any) -> None:
    """Many draws give every allowed token and no other."""
    num_draws = 3000
    tokens = kernels.sample(kernels.upload(np.tile(logits, (num_draws, 1))), batch(num_draws, **fields))
    assert set(tokens.tolist()) == allowed


@dataclass(frozen=True)
class EditCase:
    """A greedy row: what the edits make of these logits."""

    name: str
    logits: tuple[float, ...]
    expected: int
    edit: Callable[[SamplingBatch], SamplingBatch]


def _penalties(ids: Sequence[int], counts: Sequence[int], r: float, presence: float, frequency: float) -> Penalties:
    row = csr(ids)
    one = [np.array([value], np.float32) for value in (r, presence, frequency)]
    return Penalties(row.row_starts, row.token_ids, np.array(counts, np.int32), *one)


EDIT_CASES = (
    EditCase("banned", (3, 2, 1), 1, lambda b: replace(b, banned=csr([0]))),
    EditCase("allowed", (3, 2, 1), 2, lambda b: replace(b, allowed=csr([2]))),
    EditCase("allowed, but banned", (3, 2, 1), 2, lambda b: replace(b, allowed=csr([1, 2]), banned=csr([1]))),
    EditCase("no entry among the allowed: free", (3, 2, 1), 0, lambda b: replace(b, allowed=csr([]))),
    EditCase("mask", (3, 2, 1), 1, lambda b: replace(b, mask=token_mask([[1, 2]], [0]))),
    EditCase("mask, for another row", (3, 2, 1), 0, lambda b: replace(b, mask=token_mask([[1, 2]], [-1]))),
    EditCase("mask of nothing", (3, 2, 1), -1, lambda b: replace(b, mask=token_mask([[]], [0]))),
    EditCase("mask of all", (3, 2, 1), 0, lambda b: replace(b, mask=token_mask([[0, 1, 2]], [0]))),
    EditCase(
        "mask and allowed", (3, 2, 1), 2, lambda b: replace(b, mask=token_mask([[1, 2]], [0]), allowed=csr([0, 2]))
    ),
    EditCase("mask, but banned", (3, 2, 1), 2, lambda b: replace(b, mask=token_mask([[1, 2]], [0]), banned=csr([1]))),
    EditCase(
        "mask, allowed and banned leave nothing",
        (3, 2, 1),
        -1,
        lambda b: replace(b, mask=token_mask([[1, 2]], [0]), allowed=csr([0, 2]), banned=csr([2])),
    ),
    EditCase(
        "bias does not lift a grammar's mask",
        (3, 2, 1),
        1,
        lambda b: replace(b, mask=token_mask([[1, 2]], [0]), bias=csr_values({0: 9})),
    ),
    EditCase("all banned", (3, 2, 1), -1, lambda b: replace(b, banned=csr([0, 1, 2]))),
    EditCase("bias", (3, 2, 1), 2, lambda b: replace(b, bias=csr_values({2: 2.5}))),
    EditCase("bias does not lift a mask", (3, 2, 1), 1, lambda b: replace(b, banned=csr([0]), bias=csr_values({0: 9}))),
    EditCase("presence", (3, 2.5, 1), 1, lambda b: replace(b, penalties=_penalties([0], [4], 1, 0.6, 0))),
    EditCase("presence spares the prompt", (3, 2.5), 0, lambda b: replace(b, penalties=_penalties([0], [0], 1, 2, 0))),
    EditCase("frequency counts", (3, 2.5, 1), 1, lambda b: replace(b, penalties=_penalties([0], [3], 1, 0, 0.2))),
    EditCase("repetition divides", (3, 2.5, 1), 1, lambda b: replace(b, penalties=_penalties([0], [0], 1.5, 0, 0))),
    EditCase("repetition multiplies", (-2, -2.5), 1, lambda b: replace(b, penalties=_penalties([0], [0], 1.5, 0, 0))),
    EditCase(  # 4 / 2 − 1 = 1 > 0.9; the other way round (4 − 1) / 2 = 1.5
        "repetition first", (4, 1.2), 1, lambda b: replace(b, penalties=_penalties([0], [1], 2, 1, 0))
    ),
    EditCase(  # (1 + 3) / 2 = 2; the other way round 1 / 2 + 3
        "bias before penalties",
        (1, 2.5),
        1,
        lambda b: replace(b, bias=csr_values({0: 3}), penalties=_penalties([0], [0], 2, 0, 0)),
    ),
)


def check_edit(kernels: KernelSet, case: EditCase) -> None:
    logits = np.array([case.logits], np.float32)
    params = case.edit(batch(1, temperature=0.0))
    assert kernels.sample(kernels.upload(logits.copy()), params).tolist() == [case.expected]


def check_edits_stay_in_their_row(kernels: KernelSet) -> None:
    """Sparse parts of several rows, some empty, drawn beside rows without any."""
    logits = np.tile(np.array([5, 4, 3, 2, 1], np.float32), (4, 1))
    three = [np.array([1, 1, 1, 1], np.float32), np.array([0, 0, 9, 0], np.float32), np.zeros(4, np.float32)]
    params = replace(
        batch(4, temperature=0.0),
        allowed=csr([], [3, 4], [], []),
        banned=csr([0], [3], [], []),
        bias=csr_values({}, {}, {2: 1.5}, {4: 10}),
        penalties=Penalties(*_starts_ids(csr([], [], [0], [])), np.array([1], np.int32), *three),
    )
    assert kernels.sample(kernels.upload(logits), params).tolist() == [1, 4, 2, 4]


def _starts_ids(rows: Csr) -> tuple[Tokens, Tokens]:
    return rows.row_starts, rows.token_ids
