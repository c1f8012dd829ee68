"""The KV cache's blocks: what is asked of the reference is asked of Triton."""

from __future__ import annotations

from tests.kernels.test_reference_memory import (  # noqa: F401
    test_a_token_is_stored_in_its_slot_of_its_layer_and_nowhere_else,
    test_blocks_move_to_the_host_and_back,
    test_copies_of_a_step_all_read_before_any_writes,
    test_int8_blocks_hold_codes_and_a_scale_per_token_and_head,
)
