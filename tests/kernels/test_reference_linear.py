"""Weights: linear in every format, the embedding, experts."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.interface import DType, KernelSet
from tests.kernels import truth
from tests.kernels.cases import (
    BLOCK_FORMATS,
    PLAIN_FORMATS,
    assert_close,
    check_linear,
    host_weight,
    normal,
    put,
)


@pytest.mark.parametrize("format", [*PLAIN_FORMATS, *BLOCK_FORMATS])
def test_linear_in_each_format(reference: KernelSet, format: str) -> None:
    check_linear(reference, [format], num_tokens=3, with_bias=False, wide_out=False)


@pytest.mark.parametrize("wide_out", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 65])
def test_linear_of_stacked_parts(reference: KernelSet, num_tokens: int, with_bias: bool, wide_out: bool) -> None:
    check_linear(reference, ["Q4_1", "F32", "Q8_0"], num_tokens, with_bias, wide_out)


def test_packing_a_large_matrix_piece_by_piece(reference_float32: KernelSet) -> None:
    """More rows than are dequantised at once."""
    weight, values = host_weight("Q8_0", 300, 1 << 15)
    packed = reference_float32.pack_linear([weight])
    ids = np.array([0, 127, 128, 299], np.int32)
    out = reference_float32.empty((4, 1 << 15), DType.FLOAT32)
    reference_float32.embedding(reference_float32.upload(ids), packed, out)
    np.testing.assert_array_equal(reference_float32.download(out), values[ids])


def test_weights_are_counted(reference: KernelSet) -> None:
    before = reference.weight_bytes()
    reference.pack_linear([host_weight("F32", 8, 32)[0]], normal(8))
    reference.pack_vector(normal(5))
    size = 4 if reference.activation_dtype is DType.FLOAT32 else 2
    assert reference.weight_bytes() - before == (8 * 32 + 8) * size + 5 * 4


def test_embedding_scales_and_accumulates(reference: KernelSet) -> None:
    weight, _ = host_weight("BF16", 20, 32)
    values = np.asarray(weight.data, np.float64)
    packed = reference.pack_linear([weight])
    token_ids = np.array([3, 0, 19, 3], np.int32)
    out = reference.empty((4, 32), reference.activation_dtype)
    reference.embedding(reference.upload(token_ids), packed, out, scale=5.5)
    assert_close(reference, out, 5.5 * values[token_ids])
    held = reference.download(out)
    reference.embedding(reference.upload(token_ids), packed, out, scale=2.0, accumulate=True)
    assert_close(reference, out, held + 2 * values[token_ids])


@pytest.mark.parametrize("normalize", [False, True])
def test_routing_takes_the_heaviest_experts_ties_to_the_lowest_id(reference: KernelSet, normalize: bool) -> None:
    logits = normal(6, 8)
    logits[2] = 0.0
    logits[3, [1, 4, 6]] = 3.0
    x, held = put(reference, logits)
    ids, weights = reference.empty((6, 2), DType.INT32), reference.empty((6, 2), DType.FLOAT32)
    reference.route_experts(x, 2, normalize, ids, weights)
    expected_ids, expected_weights = truth.route_experts(held, 2, normalize)
    np.testing.assert_array_equal(reference.download(ids), expected_ids)
    assert reference.download(ids)[2].tolist() == [0, 1]
    assert reference.download(ids)[3].tolist() == [1, 4]
    np.testing.assert_allclose(reference.download(weights), expected_weights, rtol=1e-5)


def test_each_token_goes_through_its_own_experts(reference: KernelSet) -> None:
    """Expert 2 gets no token, expert 0 nearly all; both forms of x; the weighted sum."""
    parts = [[host_weight("Q8_0", 10, 64, seed=2 * e), host_weight("F32", 6, 64, seed=2 * e + 1)] for e in range(4)]
    packed = reference.pack_experts([[weight for weight, _ in expert] for expert in parts])
    experts = [np.concatenate([values for _, values in expert]) for expert in parts]
    ids = np.array([[0, 1], [0, 3], [3, 0], [0, 1], [1, 0]], np.int32)
    x, held = put(reference, normal(5, 64))
    up = reference.empty((5, 2, 16), reference.activation_dtype)
    reference.grouped_linear(x, packed, reference.upload(ids), up)
    assert_close(reference, up, truth.grouped_linear(held, experts, ids))

    per_choice, held_choice = put(reference, normal(5, 2, 64, seed=9))
    reference.grouped_linear(per_choice, packed, reference.upload(ids), up)
    assert_close(reference, up, truth.grouped_linear(held_choice, experts, ids))

    weights, out = normal(5, 2, seed=3), reference.empty((5, 16), reference.activation_dtype)
    reference.combine_experts(up, reference.upload(weights), out)
    expected = (reference.download(up).astype(np.float64) * weights[:, :, None]).sum(axis=1)
    assert_close(reference, out, expected)


def test_no_token_through_experts(reference: KernelSet) -> None:
    packed = reference.pack_experts([[host_weight("F32", 4, 32)[0]] for _ in range(2)])
    none = reference.empty((0, 32), reference.activation_dtype)
    reference.grouped_linear(
        none, packed, reference.empty((0, 2), DType.INT32), reference.empty((0, 2, 4), reference.activation_dtype)
    )
