"""Operations on each token alone: norms, activations, sums, rotation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kernels.interface import Activation, AttentionSpec, DType, KernelSet, KVCacheSpec, RopeSpec
from tests.kernels import truth
from tests.kernels.cases import (
    assert_close,
    check_activation_in_place,
    check_add_gated,
    check_gated_activation,
    check_norm_adds_to_the_residual,
    check_norm_per_head_in_place,
    check_rms_norm,
    cos_sin_table,
    normal,
    put,
    rotate,
)


@pytest.mark.parametrize(("num_tokens", "width"), [(0, 64), (1, 576), (3, 33), (17, 1000)])
def test_rms_norm(reference: KernelSet, num_tokens: int, width: int) -> None:
    check_rms_norm(reference, num_tokens, width)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_norm_adds_to_the_residual_first(reference: KernelSet, layer_norm: bool) -> None:
    check_norm_adds_to_the_residual(reference, layer_norm)


def test_layer_norm_without_bias(reference: KernelSet) -> None:
    x, held = put(reference, normal(4, 50))
    out, weight = reference.empty((4, 50), reference.activation_dtype), normal(50, seed=1)
    reference.layer_norm(x, reference.pack_vector(weight), None, 1e-6, out)
    assert_close(reference, out, truth.layer_norm(held, weight, 0.0, 1e-6))


def test_norm_per_head_in_place(reference: KernelSet) -> None:
    check_norm_per_head_in_place(reference)


@pytest.mark.parametrize("activation", list(Activation))
def test_activations(reference: KernelSet, activation: Activation) -> None:
    check_activation_in_place(reference, activation)
    check_gated_activation(reference, activation)


def test_sums_and_factors_in_place(reference: KernelSet) -> None:
    x, held = put(reference, normal(5, 24))
    y, held_y = put(reference, normal(5, 24, seed=1))
    reference.add(x, y)
    assert_close(reference, x, held.astype(np.float64) + held_y)
    held = reference.download(x)
    reference.scale(x, 0.3)
    assert_close(reference, x, held.astype(np.float64) * 0.3)
    held = reference.download(x)
    reference.soft_cap(x, 0.5)
    assert_close(reference, x, 0.5 * np.tanh(held.astype(np.float64) / 0.5))


@pytest.mark.parametrize(("num_tokens", "width"), [(0, 16), (1, 576), (3, 33), (29, 1000)])
def test_an_expert_behind_a_gate_is_added(reference: KernelSet, num_tokens: int, width: int) -> None:
    check_add_gated(reference, num_tokens, width)


def test_gather_rows_takes_rows_in_any_order_and_twice(reference: KernelSet) -> None:
    x, held = put(reference, normal(6, 10))
    rows = np.array([5, 0, 5, 2], np.int32)
    out = reference.empty((4, 10), reference.activation_dtype)
    reference.gather_rows(x, reference.upload(rows), out)
    np.testing.assert_array_equal(reference.download(out), held[rows])


ROPES = [
    RopeSpec(64),
    RopeSpec(64, interleaved=True),
    RopeSpec(16),  # partial: the rest of the head stays
    RopeSpec(16, interleaved=True),
]


@pytest.mark.parametrize("spec", ROPES, ids=str)
def test_rotation_equals_the_formula(reference: KernelSet, spec: RopeSpec) -> None:
    x = put(reference, normal(29, 3, 64))[1]
    positions = np.random.default_rng(0).permutation(500)[:29].astype(np.int32)
    table = cos_sin_table(500, spec.rotary_dim)
    rotated = rotate(reference, x, positions, table, spec)
    assert_close(reference, reference.upload(rotated), truth.rope(x, positions, table, spec))
    np.testing.assert_array_equal(rotated[..., spec.rotary_dim :], x[..., spec.rotary_dim :])


@pytest.mark.parametrize("spec", ROPES, ids=str)
def test_rotating_in_chunks_and_token_by_token_equals_the_whole_bit_for_bit(
    reference: KernelSet, spec: RopeSpec
) -> None:
    x, table = normal(61, 5, 64), cos_sin_table(61, spec.rotary_dim)
    positions = np.arange(61, dtype=np.int32)
    whole = rotate(reference, x, positions, table, spec)
    cuts = [0, 13, 40, *range(41, 62)]
    parts = [
        rotate(reference, x[first:last], positions[first:last], table, spec) for first, last in itertools.pairwise(cuts)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_high_position_is_not_rounded_to_the_activations_type(reference: KernelSet) -> None:
    """bfloat16 would make 99,840 of 100,000; positions are integers and the angles are the table's."""
    spec, positions = RopeSpec(8), np.array([100_000], np.int32)
    table = cos_sin_table(100_001, 8)
    x = put(reference, normal(1, 1, 8))[1]
    rotated = rotate(reference, x, positions, table, spec)
    assert_close(reference, reference.upload(rotated), truth.rope(x, positions, table, spec))
    rounded = truth.rope(x, np.array([99_840], np.int32), table, spec)
    assert np.abs(rotated - rounded).max() > 0.1


@pytest.mark.parametrize("apart", [False, True])
def test_slices_of_one_buffer_are_rotated_and_stored_like_arrays_of_their_own(
    reference: KernelSet, apart: bool
) -> None:
    """Queries, keys and values side by side in one row, as a fused projection leaves them."""
    spec, table = RopeSpec(16), cos_sin_table(50, 16)
    qkv, held = put(reference, normal(6, (4 + 2) * 16 + 2 * 8))
    q, k = qkv[:, :64].reshape(6, 4, 16), qkv[:, 64:96].reshape(6, 2, 16)
    v = qkv[:, 96:].reshape(6, 2, 8)
    if apart:
        q, k, v = (put(reference, reference.download(part))[0] for part in (q, k, v))
    cache = reference.new_kv_cache(KVCacheSpec(1, 2, 16, 2, 16, 8, reference.kv_dtype))
    positions = np.arange(20, 26, dtype=np.int32)
    slots = reference.upload(np.arange(16, 22))
    reference.rope_and_store_kv(q, k, v, reference.upload(positions), reference.upload(table), spec, cache, 0, slots)
    expected_q = truth.rope(held[:, :64].reshape(6, 4, 16), positions, table, spec)
    expected_k = truth.rope(held[:, 64:96].reshape(6, 2, 16), positions, table, spec)
    assert_close(reference, q, expected_q)
    assert_close(reference, k, expected_k)
    out = reference.empty((6, 4, 8), reference.activation_dtype)
    tables, starts, lengths = (reference.upload(np.array(x, np.int32)) for x in ([[1]], [0, 6], [6]))
    reference.paged_attention(q, cache, 0, tables, starts, lengths, AttentionSpec(0.25), out)
    expected = truth.attention(expected_q, expected_k, held[:, 96:].reshape(6, 2, 8), 0.25, None, None)
    assert_close(reference, out, expected)


def test_no_tokens_are_legal_everywhere(reference: KernelSet) -> None:
    none = reference.empty((0, 16), reference.activation_dtype)
    weight = reference.pack_vector(normal(16))
    reference.rms_norm(none, weight, 1e-5, none, none)
    reference.layer_norm(none, weight, weight, 1e-5, none, none)
    reference.add(none, none)
    reference.gated_activation(reference.empty((0, 32), reference.activation_dtype), Activation.SILU, none)
    out = reference.empty((0, 16), reference.activation_dtype)
    reference.gather_rows(none, reference.empty((0,), DType.INT32), out)
    rotate(reference, np.empty((0, 2, 8), np.float32), np.empty(0, np.int32), cos_sin_table(4, 8), RopeSpec(8))
