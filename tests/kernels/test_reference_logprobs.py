"""Log probabilities, ranks and the most likely tokens."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.interface import KernelSet


def test_logprob_is_the_log_softmax_of_the_raw_logits(reference_float32: KernelSet) -> None:
    logits = (np.random.default_rng(0).standard_normal((7, 5000)) * 4).astype(np.float32)
    token_ids = np.array([0, 1, 4999, 17, 17, 300, 2], np.int32)
    result = reference_float32.logprobs(reference_float32.upload(logits.copy()), token_ids, 3)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(result.logprob, expected[np.arange(7), token_ids], atol=1e-5)
    np.testing.assert_allclose(result.top_logprobs, -np.sort(-expected, axis=1)[:, :3], atol=1e-5)
    order = np.argsort(-wide, axis=1, kind="stable")
    np.testing.assert_array_equal(result.top_token_ids, order[:, :3])
    ranks = [int(np.flatnonzero(order[row] == token)[0]) + 1 for row, token in enumerate(token_ids)]
    assert result.rank.tolist() == ranks
    assert result.rank.dtype == result.top_token_ids.dtype == np.int32
    assert result.logprob.dtype == result.top_logprobs.dtype == np.float32


def test_ties_are_ranked_by_id(reference_float32: KernelSet) -> None:
    """Four equal tokens: each has its own rank, and the list is cut by id."""
    logits = np.zeros((4, 100), np.float32)
    logits[:, [80, 10, 40, 60]] = 5.0
    result = reference_float32.logprobs(reference_float32.upload(logits), np.array([10, 40, 60, 80], np.int32), 3)
    assert result.rank.tolist() == [1, 2, 3, 4]
    assert result.top_token_ids.tolist() == [[10, 40, 60]] * 4


def test_infinities_and_nan(reference_float32: KernelSet) -> None:
    logits = np.array([[0, -np.inf, 1], [np.nan, 0, 0]], np.float32)
    result = reference_float32.logprobs(reference_float32.upload(logits), np.array([1, 1], np.int32), 3)
    assert result.logprob[0] == -np.inf
    assert result.rank[0] == 3
    assert np.isnan(result.logprob[1])


@pytest.mark.parametrize("top", [0, 5])
def test_no_rows_and_no_alternatives(reference_float32: KernelSet, top: int) -> None:
    empty = reference_float32.upload(np.empty((0, 8), np.float32))
    result = reference_float32.logprobs(empty, np.empty(0, np.int32), top)
    assert result.top_token_ids.shape == (0, top)
    assert result.logprob.shape == (0,)


def test_more_alternatives_than_tokens(reference_float32: KernelSet) -> None:
    logits = reference_float32.upload(np.array([[1, 3, 2]], np.float32))
    assert reference_float32.logprobs(logits, np.array([0], np.int32), 20).top_token_ids.tolist() == [[1, 2, 0]]
