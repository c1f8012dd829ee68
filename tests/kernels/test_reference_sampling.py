"""The torch reference's draws: the contract to the letter, distributions, ties, what can never be drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.interface import KernelSet
from kernels.reference import philox as reference_philox
from kernels.reference.sampling import _NOISE_RANGE
from tests.kernels.sampling_cases import (
    EDIT_CASES,
    PHILOX_VECTORS,
    EditCase,
    batch,
    check_distribution,
    check_edit,
    check_edits_stay_in_their_row,
    check_masks,
    check_nan_under_a_mask,
    check_same_draws,
    check_support,
    csr,
    draw,
    noise,
    philox,
    survivors,
)


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_VECTORS)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """On numpy's and on torch's integers, and in the tests' own formula."""
    assert philox(counter, key) == expected
    for make in (lambda word: np.array([word], np.uint64), lambda word: torch.tensor([word])):
        c0, c1, c2, c3 = (make(word) for word in counter)
        words = reference_philox.philox((c0, c1, c2, c3), key)
        assert tuple(int(word[0]) for word in words) == expected


def test_noise_is_the_contracts(device: str) -> None:
    token_ids = torch.tensor([0, 1, 5000, 49151, 262143], device=device)
    seed, position, choice = 0xDEADBEEF12345678, 77, 3
    got = reference_philox.gumbel(token_ids, seed, position, choice, 0)
    assert got.tolist() == [noise(int(token), seed, position, choice) for token in token_ids]


def test_noise_of_many_tokens_equals_that_of_each_alone() -> None:
    """The host computes it in chunks."""
    token_ids = torch.arange(40_000)
    whole = reference_philox.gumbel(token_ids, 3, 1, 0, 0)
    for first, last in ((0, 1), (16_383, 16_385), (39_999, 40_000)):
        assert torch.equal(whole[first:last], reference_philox.gumbel(token_ids[first:last], 3, 1, 0, 0))


def test_the_noise_is_finite_at_both_ends() -> None:
    """A float32 u would be 1 for the 128 highest words, and their token would win whatever its logit."""
    for word, bound in ((0, -3.2), (2**32 - 1, 22.9)):
        u = (np.float64(word) + 0.5) * 2.0**-32
        value = -np.log(-np.log(u))
        assert abs(value) <= abs(bound)
    assert _NOISE_RANGE >= 22.9 + 3.2


def test_every_row_gives_the_contracts_token(reference_float32: KernelSet) -> None:
    check_same_draws(reference_float32)


@pytest.mark.parametrize("vary", ["seed", "output_position", "choice_index"])
def test_draws_follow_the_softmax(reference_float32: KernelSet, vary: str) -> None:
    check_distribution(reference_float32, vary)


def test_seed_position_and_choice_decide_a_draw(reference_float32: KernelSet) -> None:
    """Equal keys repeat; a change of any one gives other draws."""
    logits = reference_float32.upload(np.zeros((32, 5000), np.float32))
    base = batch(32, seed=np.arange(32), output_position=4, choice_index=1)
    tokens = reference_float32.sample(logits, base).tolist()
    assert reference_float32.sample(logits, base).tolist() == tokens
    for change in (
        {"seed": base.seed + np.uint64(1 << 32)},
        {"output_position": base.output_position + np.int32(1)},
        {"choice_index": base.choice_index + np.int32(1)},
    ):
        assert reference_float32.sample(logits, replace(base, **change)).tolist() != tokens


TIED = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, -1.0], np.float32)


def test_top_k_keeps_ties_of_the_kth(reference_float32: KernelSet) -> None:
    check_support(reference_float32, TIED, {1, 3}, top_k=1)
    check_support(reference_float32, TIED, {1, 3, 2, 4, 5}, top_k=3)


def test_top_p_keeps_or_drops_ties_together(reference_float32: KernelSet) -> None:
    """Two tokens of probability 0.30 each, three of 0.11: p decides for whole tiers."""
    check_support(reference_float32, TIED, {1, 3}, top_p=0.2)
    check_support(reference_float32, TIED, {1, 3}, top_p=0.6)
    check_support(reference_float32, TIED, {1, 2, 3, 4, 5}, top_p=0.7)
    check_support(reference_float32, TIED, {1, 2, 3, 4, 5}, top_p=0.93)


def test_min_p_keeps_what_is_near_the_best(reference_float32: KernelSet) -> None:
    check_support(reference_float32, TIED, {1, 3}, min_p=1.0)
    check_support(reference_float32, TIED, {1, 2, 3, 4, 5}, min_p=0.2)


def test_filters_apply_one_after_the_other(reference_float32: KernelSet) -> None:
    """top_p sees the probabilities that top_k left: alone 0.9 keeps six tokens of ten, after top_k 4 three."""
    logits = np.log(np.array([30, 20, 15, 12, 8, 5, 4, 3, 2, 1], np.float32))
    assert len(survivors(logits, 0, 0.9, 0.0, 1.0)) == 6
    check_support(reference_float32, logits, {0, 1, 2}, top_k=4, top_p=0.8)
    check_support(reference_float32, logits, {0, 1}, top_k=4, top_p=0.8, min_p=0.6)


def test_top_p_one_keeps_everything_though_a_float32_sum_never_reaches_one(reference_float32: KernelSet) -> None:
    """128,256 tokens in float32: the running sum ends below 1 and a search for p = 1 would find no cutoff."""
    vocab_size = 128_256
    logits = np.random.default_rng(1).standard_normal(vocab_size).astype(np.float32)
    weights = np.exp(np.sort(logits)[::-1])
    assert np.cumsum(weights / weights.sum(dtype=np.float64).astype(np.float32), dtype=np.float32)[-1] != 1.0
    uploaded = reference_float32.upload(np.tile(logits, (3, 1)))
    for top_p in (1.0, float(np.nextafter(np.float32(1.0), np.float32(0.0)))):
        params = batch(3, top_p=top_p, temperature=5.0)
        tokens = reference_float32.sample(uploaded, params)
        assert (tokens >= 0).all()
        assert tokens.tolist() == reference_float32.sample(uploaded, batch(3, temperature=5.0)).tolist()


def test_a_nucleus_wider_than_the_first_guess(reference_float32: KernelSet) -> None:
    """p = 0.7 of 5,000 almost even tokens holds far more than what is sorted at first."""
    logits = (np.random.default_rng(2).standard_normal(5000) * 0.01).astype(np.float32)
    params = batch(200, top_p=0.7)
    tokens = reference_float32.sample(reference_float32.upload(np.tile(logits, (200, 1))), params)
    kept = survivors(logits, 0, 0.7, 0.0, 1.0)
    assert 1024 < len(kept) < 4000
    assert set(tokens.tolist()) <= set(kept)
    assert [draw(logits, params, row) for row in range(3)] == tokens[:3].tolist()


def test_forbidden_tokens_are_never_drawn(reference_float32: KernelSet) -> None:
    """The two likeliest are banned, the free rows beside them still draw them."""
    logits = np.tile(np.array([9, 9, 1, 1, 1], np.float32), (2000, 1))
    rows = [[0, 1] if row % 2 else [] for row in range(2000)]
    tokens = reference_float32.sample(reference_float32.upload(logits), replace(batch(2000), banned=csr(*rows)))
    assert set(tokens[1::2].tolist()) == {2, 3, 4}
    assert set(tokens[::2].tolist()) <= {0, 1, 2, 3, 4}
    assert {0, 1} <= set(tokens[::2].tolist())


@pytest.mark.parametrize("case", EDIT_CASES, ids=lambda case: case.name)
def test_edits(reference_float32: KernelSet, case: EditCase) -> None:
    check_edit(reference_float32, case)


def test_a_grammars_mask_draws_from_its_tokens_alone(reference_float32: KernelSet) -> None:
    check_masks(reference_float32)


def test_a_nan_is_told_whatever_a_grammars_mask_hides(reference_float32: KernelSet) -> None:
    check_nan_under_a_mask(reference_float32)


def test_edits_stay_in_their_row(reference_float32: KernelSet) -> None:
    check_edits_stay_in_their_row(reference_float32)


def test_greedy_ties_go_to_the_lowest_id(reference_float32: KernelSet) -> None:
    logits = np.zeros((2, 1000), np.float32)
    logits[0, [700, 300, 999]] = 2.0
    uploaded = reference_float32.upload(logits)
    assert reference_float32.sample(uploaded, batch(2, temperature=0.0)).tolist() == [300, 0]
    mixed = batch(2, temperature=[0.0, 1.0])  # the slower path
    assert reference_float32.sample(uploaded, mixed)[0] == 300


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_fails_its_row_alone(reference_float32: KernelSet, temperature: float) -> None:
    """Also where a mask hides it, and at both ends of the row."""
    logits = np.zeros((4, 64), np.float32)
    logits[:, 9] = 50.0
    logits[1, 0] = logits[2, 63] = np.nan
    uploaded = reference_float32.upload(logits)
    params = batch(4, temperature=temperature)
    assert reference_float32.sample(uploaded, params).tolist() == [9, -1, -1, 9]
    banned = replace(params, banned=csr([], [0], [63], []))
    assert reference_float32.sample(uploaded, banned).tolist() == [9, -1, -1, 9]


def test_a_row_of_minus_infinity_has_no_token(reference_float32: KernelSet) -> None:
    logits = reference_float32.upload(np.full((2, 8), -np.inf, np.float32))
    assert reference_float32.sample(logits, batch(2, temperature=[0.0, 1.0])).tolist() == [-1, -1]
    assert reference_float32.sample(logits, batch(2, temperature=0.0)).tolist() == [-1, -1]


def test_no_rows(reference_float32: KernelSet) -> None:
    assert reference_float32.sample(reference_float32.upload(np.empty((0, 8), np.float32)), batch(0)).tolist() == []
