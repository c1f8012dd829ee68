"""Paged attention of the torch reference, and what it must keep apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.interface import AttentionSpec, DType, KernelSet
from kernels.reference.attention import plan_attention
from tests.kernels import truth
from tests.kernels.cases import (
    ATTENTION_CASES,
    AttentionCase,
    assert_close,
    check_attention,
    fill_cache,
    normal,
    put,
    run_attention,
)

SPEC = AttentionSpec(0.125)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_equals_the_formula(reference: KernelSet, case: AttentionCase) -> None:
    check_attention(reference, case)


@pytest.mark.parametrize("case", [ATTENTION_CASES[2], ATTENTION_CASES[3]], ids=lambda case: case.name)
def test_an_int8_cache_costs_little(reference_float32: KernelSet, case: AttentionCase) -> None:
    """Codes are off by at most 1/254 of a head's largest value; what nobody owns stays out as before."""
    check_attention(reference_float32, case, DType.INT8, factor=1000)


def test_a_nan_in_one_sequence_leaves_the_others_as_they_were(reference: KernelSet) -> None:
    case = AttentionCase("decodes", ((1, 40), (1, 35), (1, 48)))
    batch = fill_cache(reference, case)
    q = normal(3, 9, 64)
    out = reference.empty((3, 9, 64), reference.activation_dtype)
    run_attention(reference, batch, put(reference, q)[0], SPEC, out)
    clean = reference.download(out)
    q[1] = np.nan
    run_attention(reference, batch, put(reference, q)[0], SPEC, out)
    poisoned = reference.download(out)
    assert np.isnan(poisoned[1]).all()
    np.testing.assert_array_equal(poisoned[[0, 2]], clean[[0, 2]])


def test_plans_are_kept_within_run_and_forgotten_after(reference: KernelSet) -> None:
    """The same index buffers with other contents in the next step."""
    case = AttentionCase("two", ((1, 40), (1, 40)))
    batch = fill_cache(reference, case)
    q, held = put(reference, normal(2, 9, 64))
    out = reference.empty((2, 9, 64), reference.activation_dtype)
    tables, starts = reference.upload(batch.block_tables), reference.upload(batch.query_start_loc)
    lengths = reference.upload(batch.seq_lens.copy())

    def forward() -> None:
        reference.paged_attention(q, batch.cache, 1, tables, starts, lengths, SPEC, out)

    for seen in (40, 20, 33):
        reference.write(lengths, np.full(2, seen, np.int32))
        reference.run("step", forward)
        for row in range(2):
            expected = truth.attention(
                held[row : row + 1], batch.keys[row][:seen], batch.values[row][:seen], SPEC.scale, None, None
            )
            assert_close(reference, out[row : row + 1], expected)


def test_memory_of_a_long_prompt_is_linear(reference_float32: KernelSet) -> None:
    """A chunk at the end of 6,000 tokens: the tiles of queries bound masks and scores."""
    case = AttentionCase("long", ((1000, 6000),), num_heads=1, num_kv_heads=1, head_dim=8)
    check_attention(reference_float32, case)
    batch = fill_cache(reference_float32, case)
    plan = plan_attention(
        torch.from_numpy(batch.block_tables),
        torch.from_numpy(batch.query_start_loc),
        torch.from_numpy(batch.seq_lens),
        16,
        None,
        torch.float32,
    )
    assert max(tile.num_queries for tile in plan.prefills[0].tiles) <= 256


def test_padding_between_decodes_is_bounded() -> None:
    """One long sequence among short ones is not padded to, nor are the short ones padded up to it."""
    lengths = [20] * 30 + [8000]
    tables = torch.ones((31, 500), dtype=torch.int32)
    starts = torch.arange(32, dtype=torch.int32)
    plan = plan_attention(tables, starts, torch.tensor(lengths, dtype=torch.int32), 16, None, torch.float32)
    assert sum(len(group.block_ids) for group in plan.decodes) == 30 * 2 + 500
