"""Operations on each token alone: what is asked of the reference is asked of Triton."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kernels.interface import KernelSet, RopeSpec
from tests.kernels.cases import cos_sin_table, normal, rotate
from tests.kernels.test_reference_tokens import (  # noqa: F401
    test_a_high_position_is_not_rounded_to_the_activations_type,
    test_activations,
    test_an_expert_behind_a_gate_is_added,
    test_gather_rows_takes_rows_in_any_order_and_twice,
    test_layer_norm_without_bias,
    test_no_tokens_are_legal_everywhere,
    test_norm_adds_to_the_residual_first,
    test_norm_per_head_in_place,
    test_rms_norm,
    test_rotation_equals_the_formula,
    test_slices_of_one_buffer_are_rotated_and_stored_like_arrays_of_their_own,
    test_sums_and_factors_in_place,
)


@pytest.mark.parametrize("spec", [RopeSpec(64), RopeSpec(16, interleaved=True)], ids=str)
def test_rotating_in_chunks_equals_the_whole_bit_for_bit(kernels_bfloat16: KernelSet, spec: RopeSpec) -> None:
    x, table = normal(21, 5, 64), cos_sin_table(21, spec.rotary_dim)
    positions = np.arange(21, dtype=np.int32)
    whole = rotate(kernels_bfloat16, x, positions, table, spec)
    parts = [
        rotate(kernels_bfloat16, x[first:last], positions[first:last], table, spec)
        for first, last in itertools.pairwise([0, 13, 18, 19, 20, 21])
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
