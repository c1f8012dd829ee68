"""Draws and logprobs in Triton: the contract's tests that are quick enough for the interpreter, chunks and bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.interface import KernelSet, TokenMask
from kernels.reference import sampling as reference_sampling
from kernels.triton import vocabulary
from kernels.triton.bounds import Rows
from kernels.triton.sampling import _numbers as sampling_numbers
from kernels.triton.sampling import gumbel
from tests.kernels.sampling_cases import (
    EDIT_CASES,
    EditCase,
    batch,
    check_edit,
    check_edits_stay_in_their_row,
    check_same_draws,
    csr,
    draw,
    noise,
    survivors,
)
from tests.kernels.test_reference_logprobs import (  # noqa: F401
    test_infinities_and_nan,
    test_logprob_is_the_log_softmax_of_the_raw_logits,
    test_more_alternatives_than_tokens,
    test_no_rows_and_no_alternatives,
    test_ties_are_ranked_by_id,
)
from tests.kernels.test_reference_sampling import (  # noqa: F401
    test_a_nan_fails_its_row_alone,
    test_a_row_of_minus_infinity_has_no_token,
    test_greedy_ties_go_to_the_lowest_id,
    test_no_rows,
)
from tests.kernels.triton.conftest import DEVICE

CHUNK = vocabulary.CHUNK.value


@pytest.fixture(scope="module")
def reference_float32(kernels_float32: KernelSet) -> KernelSet:
    return kernels_float32


def test_noise_is_the_contracts() -> None:
    """Through a kernel of one block: words of the generator, and the float64 logarithms."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def noise_kernel(
        tokens: tl.tensor, out: tl.tensor, seed: tl.tensor, position: tl.tensor, choice: tl.tensor
    ) -> None:
        i = tl.arange(0, 4)
        ids = tl.load(tokens + i)
        tl.store(out + i, gumbel(ids, tl.load(seed), tl.load(position), tl.load(choice)))

    seed, position, choice = 0xDEADBEEF12345678, 77, 3
    ids = [0, 5000, 49151, 262143]
    out = torch.zeros(4, device=DEVICE)
    numbers = torch.tensor([np.uint64(seed).astype(np.int64)], device=DEVICE)
    small = [torch.tensor([value], dtype=torch.int32, device=DEVICE) for value in (position, choice)]
    noise_kernel[(1,)](torch.tensor(ids, dtype=torch.int32, device=DEVICE), out, numbers, *small)
    assert out.tolist() == [noise(token, seed, position, choice) for token in ids]


def test_every_row_gives_the_contracts_token(kernels_float32: KernelSet) -> None:
    check_same_draws(kernels_float32)


@pytest.mark.parametrize("case", EDIT_CASES, ids=lambda case: case.name)
def test_edits(kernels_float32: KernelSet, case: EditCase) -> None:
    check_edit(kernels_float32, case)


def test_edits_stay_in_their_row(kernels_float32: KernelSet) -> None:
    check_edits_stay_in_their_row(kernels_float32)


def test_a_grammars_mask_and_a_list_of_allowed_tokens_both_count(kernels_float32: KernelSet) -> None:
    """Rows without a mask, with one, with one and a list; a chunk that ends within a word."""
    vocab_size = CHUNK + 37
    logits = np.zeros((4, vocab_size), np.float32)
    logits[:, [5, 40, vocab_size - 1]] = [3.0, 2.0, 1.0]
    bits = np.zeros((2, -(-vocab_size // 32)), np.uint32)
    for mask, tokens in enumerate(((40, vocab_size - 1), (vocab_size - 1, 7))):
        for token in tokens:
            bits[mask, token // 32] |= np.uint32(1 << token % 32)
    params = replace(
        batch(4, temperature=0.0),
        mask=TokenMask(np.array([-1, 0, 1, 0], np.int32), bits),
        allowed=csr([], [], [], [5, vocab_size - 1]),
    )
    assert kernels_float32.sample(kernels_float32.upload(logits), params).tolist() == [
        5,
        40,
        vocab_size - 1,
        vocab_size - 1,
    ]


# The bulk lies far below the best, all of it near, or half and half: bounds come from the near ones or the whole row.
SPREADS = (12.0, 0.01, 4.0)


@pytest.mark.parametrize("spread", SPREADS)
def test_a_vocabulary_of_several_chunks(kernels_float32: KernelSet, spread: float) -> None:
    num_rows, vocab_size = 6, CHUNK + 5
    logits = (np.random.default_rng(3).standard_normal((num_rows, vocab_size)) * spread).astype(np.float32)
    params = batch(
        num_rows,
        temperature=[0.7, 1.0, 1.0, 1.3, 1.0, 0.0],
        top_k=[0, 50, 3500, 0, 2000, 0],
        top_p=[0.9, 1.0, 0.999, 0.5, 0.95, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.01, 0.1, 0.0],
        seed=np.arange(num_rows, dtype=np.uint64) * np.uint64(0x123456789ABCDEF),
    )
    tokens = kernels_float32.sample(kernels_float32.upload(logits), params)
    assert tokens.tolist() == [draw(logits[row], params, row) for row in range(num_rows)]


TIED = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, -1.0], np.float32)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 1}, {1, 3}),
        ({"top_k": 3}, {1, 2, 3, 4, 5}),
        ({"top_p": 0.2}, {1, 3}),
        ({"top_p": 0.7}, {1, 2, 3, 4, 5}),
        ({"min_p": 1.0}, {1, 3}),
        ({"top_k": 3, "top_p": 0.5}, {1, 3}),
    ],
)
def test_ties_are_kept_or_dropped_together(fields: dict[str, float], kept: set[int]) -> None:
    everything_off: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
    assert set(survivors(TIED, **everything_off | fields)) == kept
    assert left(TIED, **fields) == kept


def test_zeros_of_both_signs_are_one_tie() -> None:
    logits = np.array([0.0, -0.0, -1.0, -0.0], np.float32)
    for fields in ({"top_k": 1}, {"top_k": 3}, {"top_p": 0.6}):
        assert left(logits, **fields) == {0, 1, 3}


def left(logits: npt.NDArray[np.float32], **fields: float) -> set[int]:
    """The tokens of a row that the filters leave."""
    uploaded = torch.from_numpy(logits[None]).to(DEVICE)
    rows = Rows(uploaded, uploaded, sampling_numbers(batch(1, **fields), uploaded.device))
    rows.find_best()
    rows.find_bounds(filtered=True, drawn=True)
    return set(np.flatnonzero(logits >= rows.lowest.item()).tolist())


def test_an_infinite_logit_wins(kernels_float32: KernelSet) -> None:
    """Also one that a small temperature makes infinite."""
    logits = np.array([[0, np.inf, 3, np.inf], [0, 1, 3e38, 2]], np.float32)
    params = batch(2, temperature=[1.0, 0.5], top_p=0.9)
    assert kernels_float32.sample(kernels_float32.upload(logits), params).tolist() == [1, 2]


@pytest.mark.parametrize("top", [0, 3, 4500])
def test_logprobs_over_several_chunks_equal_the_references(kernels_float32: KernelSet, top: int) -> None:
    """Ties across the edges of chunks; more than lie near the best."""
    logits = (np.random.default_rng(0).standard_normal((3, CHUNK + 900)) * 4).astype(np.float32)
    logits[1, [7, CHUNK - 1, CHUNK, CHUNK + 899]] = 25.0
    logits[2] = np.round(logits[2])
    token_ids = np.array([1, CHUNK, CHUNK + 899], np.int32)
    got = kernels_float32.logprobs(kernels_float32.upload(logits), token_ids, top)
    expected = reference_sampling.logprobs(torch.from_numpy(logits), token_ids, top)
    np.testing.assert_array_equal(got.rank, expected.rank)
    np.testing.assert_array_equal(got.top_token_ids, expected.top_token_ids)
    np.testing.assert_allclose(got.logprob, expected.logprob, rtol=1e-6)
    np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, rtol=1e-6)


def test_a_row_does_not_depend_on_its_neighbours(kernels_float32: KernelSet) -> None:
    logits = (np.random.default_rng(9).standard_normal((5, CHUNK + 3)) * 3).astype(np.float32)
    params = batch(5, top_p=0.8, seed=np.arange(5, dtype=np.uint64))
    together = kernels_float32.sample(kernels_float32.upload(logits), params)
    alone = kernels_float32.sample(kernels_float32.upload(logits[3:4]), batch(1, top_p=0.8, seed=3))
    assert alone[0] == together[3]
