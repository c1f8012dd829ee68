"""The native kernels pass the reference's own tests, on every instruction set of this machine."""

from __future__ import annotations

import pytest

from kernels.interface import DType, KernelSet
from tests.kernels.native_cases import ISAS, kernels_for
from tests.kernels.test_reference_attention import (  # noqa: F401
    test_a_nan_in_one_sequence_leaves_the_others_as_they_were,
    test_equals_the_formula,
    test_plans_are_kept_within_run_and_forgotten_after,
)
from tests.kernels.test_reference_linear import (  # noqa: F401
    test_each_token_goes_through_its_own_experts,
    test_embedding_scales_and_accumulates,
    test_linear_of_stacked_parts,
    test_no_token_through_experts,
    test_packing_a_large_matrix_piece_by_piece,
    test_routing_takes_the_heaviest_experts_ties_to_the_lowest_id,
)
from tests.kernels.test_reference_logprobs import *  # noqa: F403
from tests.kernels.test_reference_memory import (  # noqa: F401
    test_a_cache_in_host_memory_takes_memory_as_it_is_written,
    test_a_download_stays_when_the_array_changes,
    test_an_array_of_each_type_comes_back,
    test_bfloat16_of_the_host_is_taken_bit_for_bit,
    test_read_only_and_strided_hosts_are_taken,
)
from tests.kernels.test_reference_sampling import (  # noqa: F401
    test_a_grammars_mask_draws_from_its_tokens_alone,
    test_a_nan_fails_its_row_alone,
    test_a_nan_is_told_whatever_a_grammars_mask_hides,
    test_a_nucleus_wider_than_the_first_guess,
    test_a_row_of_minus_infinity_has_no_token,
    test_draws_follow_the_softmax,
    test_edits,
    test_edits_stay_in_their_row,
    test_every_row_gives_the_contracts_token,
    test_filters_apply_one_after_the_other,
    test_forbidden_tokens_are_never_drawn,
    test_greedy_ties_go_to_the_lowest_id,
    test_min_p_keeps_what_is_near_the_best,
    test_no_rows,
    test_seed_position_and_choice_decide_a_draw,
    test_top_k_keeps_ties_of_the_kth,
    test_top_p_keeps_or_drops_ties_together,
    test_top_p_one_keeps_everything_though_a_float32_sum_never_reaches_one,
)
from tests.kernels.test_reference_tokens import *  # noqa: F403


@pytest.fixture(scope="module", params=ISAS)
def reference(request: pytest.FixtureRequest) -> KernelSet:
    return kernels_for(request.param, threads=2, dtype=DType.FLOAT32)


@pytest.fixture(scope="module", params=ISAS)
def reference_float32(request: pytest.FixtureRequest) -> KernelSet:
    return kernels_for(request.param, threads=2, dtype=DType.FLOAT32)


@pytest.mark.parametrize("isa", ISAS)
def test_the_description_names_the_arithmetic_and_not_the_threads(isa: str) -> None:
    """It goes into the system fingerprint, which once changed with --threads though no answer did."""
    one, two = (kernels_for(isa, threads=threads, dtype=DType.FLOAT32) for threads in (1, 2))
    assert one.description == two.description
    assert isa in one.description
