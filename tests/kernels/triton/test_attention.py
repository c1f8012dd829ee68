"""Paged attention in Triton."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.interface import AttentionSpec, DType, KernelSet, KVCacheSpec
from kernels.reference.arrays import TORCH_DTYPES
from kernels.reference.kv_cache import gather
from kernels.reference.torch_kernels import TorchKernels
from tests.kernels import truth
from tests.kernels.cases import (
    ATTENTION_CASES,
    AWKWARD,
    LAYER,
    AttentionCase,
    PagedBatch,
    assert_close,
    fill_cache,
    normal,
    put,
    run_attention,
)
from tests.kernels.pairwise import pairwise

MakeKernels = Callable[[DType], KernelSet]

SMALL = ((1, 70), (5, 18), (35, 90), (1, 300))
# of the largest value: half a unit in its last place, or the roundings of a few sums
LEAST_ERROR = {DType.FLOAT32: 1e-6, DType.FLOAT16: 2**-11, DType.BFLOAT16: 2**-8}
FEW_CASES = [case for case in ATTENTION_CASES if case.sequences != AWKWARD]
AWKWARD_CASES = [
    AttentionCase("five heads on one", AWKWARD, num_heads=5, num_kv_heads=1),
    AttentionCase(
        "window, cap and padding", AWKWARD, num_heads=4, num_kv_heads=1, window=100, soft_cap=2.0, num_padding=3
    ),
]
GRID = pairwise(
    dtype=(DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16),
    kv_dtype=(None, DType.INT8),
    dims=((64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (24, 16), (192, 128)),
    block_size=(16, 32, 64, 128),
    heads=((5, 1), (6, 2), (2, 2)),
    window=(None, 7, 64),
    soft_cap=(None, 2.0),
)


def _torch(dtype: DType) -> KernelSet:
    """Fills caches, too: the interpreter would take a program a token."""
    return TorchKernels(device="cuda" if torch.cuda.is_available() else "cpu", dtype=dtype, num_threads=1)


@pytest.mark.parametrize("case", [*FEW_CASES, *AWKWARD_CASES], ids=lambda case: case.name)
def test_equals_the_formula(kernels_float32: KernelSet, case: AttentionCase) -> None:
    batch = fill_cache(_torch(DType.FLOAT32), case)
    num_tokens = int(batch.query_start_loc[-1]) + case.num_padding
    q, held = put(kernels_float32, normal(num_tokens, case.num_heads, case.head_dim, seed=1))
    out = kernels_float32.empty((num_tokens, case.num_heads, batch.spec.value_head_dim), DType.FLOAT32)
    spec = AttentionSpec(case.head_dim**-0.5, case.window, case.soft_cap)
    run_attention(kernels_float32, batch, q, spec, out)
    for row, (first, last) in enumerate(itertools.pairwise(batch.query_start_loc)):
        expected = truth.attention(
            held[first:last], batch.keys[row], batch.values[row], spec.scale, spec.window, spec.soft_cap
        )
        assert_close(kernels_float32, out[int(first) : int(last)], expected)


@pytest.mark.parametrize("values", GRID, ids=lambda values: "-".join(map(str, values.values())))
def test_errs_at_most_twice_as_much_as_torch_in_the_same_type(
    make_kernels: MakeKernels, values: dict[str, Any]
) -> None:
    kernels, dtype = make_kernels(values["dtype"]), TORCH_DTYPES[values["dtype"]]
    case = AttentionCase(
        "grid",
        SMALL,
        num_heads=values["heads"][0],
        num_kv_heads=values["heads"][1],
        head_dim=values["dims"][0],
        value_head_dim=values["dims"][1],
        block_size=values["block_size"],
        window=values["window"],
        soft_cap=values["soft_cap"],
    )
    batch = fill_cache(_torch(values["dtype"]), case, kv_dtype=values["kv_dtype"])
    q, held = put(kernels, normal(42, case.num_heads, case.head_dim, seed=1))
    spec = AttentionSpec(case.head_dim**-0.5, case.window, case.soft_cap)
    out = kernels.empty((42, case.num_heads, batch.spec.value_head_dim), values["dtype"])
    run_attention(kernels, batch, q, spec, out)
    for row, (first, last) in enumerate(itertools.pairwise(batch.query_start_loc)):
        keys, cached_values = _cached(batch, row)
        expected = truth.attention(held[first:last], keys, cached_values, spec.scale, case.window, case.soft_cap)
        ours = float(np.abs(kernels.download(out)[first:last] - expected).max())
        theirs = float(np.abs(_plain_attention(held[first:last], keys, cached_values, spec, dtype) - expected).max())
        least = LEAST_ERROR[values["dtype"]] * float(np.abs(expected).max())
        assert ours <= max(2 * theirs, least), f"sequence {row}: off by {ours:.3g}, torch by {theirs:.3g}"


def _plain_attention(q: Any, k: Any, v: Any, spec: AttentionSpec, dtype: torch.dtype) -> Any:
    """The formula as torch computes it step by step, each step rounded to the type."""
    group = q.shape[1] // k.shape[1]
    queries, keys, values = (torch.from_numpy(x).to(dtype).transpose(0, 1) for x in (q, k, v))
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = queries @ keys.transpose(1, 2) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    key_positions = torch.arange(len(k))
    query_positions = torch.arange(len(k) - len(q), len(k))[:, None]
    hidden = key_positions > query_positions
    if spec.window is not None:
        hidden |= key_positions <= query_positions - spec.window
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return (weights @ values).transpose(0, 1).float().numpy()


def _cached(batch: PagedBatch, row: int) -> tuple[Any, Any]:
    """What the cache holds of a sequence, widened to float32: codes times scales."""
    length = int(batch.seq_lens[row])
    ids = torch.from_numpy(batch.block_tables[row, : -(-length // batch.spec.block_size)])
    parts = gather(batch.cache, LAYER, ids.to(batch.cache.blocks.device), None, torch.float32)
    keys, values = (part[:length].cpu().numpy() for part in parts)
    return keys, values


def _attend(kernels: KernelSet, batch: PagedBatch, q: Any, rows: slice, queries: int) -> Any:
    """The sequences `rows` of a batch in a call of their own, the last `queries` tokens of each."""
    lengths = batch.seq_lens[rows]
    part = replace(
        batch,
        block_tables=batch.block_tables[rows],
        query_start_loc=np.arange(len(lengths) + 1, dtype=np.int32) * queries,
        seq_lens=lengths,
    )
    out = kernels.empty((len(q), q.shape[1], batch.spec.value_head_dim), kernels.activation_dtype)
    run_attention(kernels, part, put(kernels, q)[0], AttentionSpec(0.125), out)
    return kernels.download(out)


def test_a_decode_is_the_same_bits_alone_and_among_others(kernels_bfloat16: KernelSet) -> None:
    lengths = (1, 256, 257, 600)
    decodes = tuple((1, n) for n in lengths)
    batch = fill_cache(_torch(DType.BFLOAT16), AttentionCase("decodes", decodes, num_heads=3, num_kv_heads=1))
    q = normal(len(lengths), 3, 64)
    together = _attend(kernels_bfloat16, batch, q, slice(None), 1)
    for row in range(len(lengths)):
        alone = _attend(kernels_bfloat16, batch, q[row : row + 1], slice(row, row + 1), 1)
        np.testing.assert_array_equal(alone[0], together[row])


def test_a_nan_in_one_sequence_leaves_the_others_as_they_were(kernels_bfloat16: KernelSet) -> None:
    batch = fill_cache(_torch(DType.BFLOAT16), AttentionCase("decodes", ((1, 40), (1, 35), (1, 48))))
    q = normal(3, 9, 64)
    clean = _attend(kernels_bfloat16, batch, q, slice(None), 1)
    q[1] = np.nan
    poisoned = _attend(kernels_bfloat16, batch, q, slice(None), 1)
    assert np.isnan(poisoned[1]).all()
    np.testing.assert_array_equal(poisoned[[0, 2]], clean[[0, 2]])


def test_more_partial_results_than_fit_are_made_in_turns(
    kernels_bfloat16: KernelSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = fill_cache(
        _torch(DType.BFLOAT16), AttentionCase("decodes", ((1, 600), (1, 30)), num_heads=3, num_kv_heads=1)
    )
    q = normal(2, 3, 64)
    at_once = _attend(kernels_bfloat16, batch, q, slice(None), 1)
    monkeypatch.setattr("kernels.triton.attention._MAX_PARTIAL_BYTES", 1)
    np.testing.assert_array_equal(_attend(kernels_bfloat16, batch, q, slice(None), 1), at_once)


def test_batch_invariant_prefills_add_up_as_decodes_do(make_kernels: MakeKernels) -> None:
    """A token's attention is the same bits as the end of a chunk and as a decode; lengths cross segments."""
    kernels = make_kernels(DType.BFLOAT16)
    kernels.batch_invariant = True
    batch = fill_cache(_torch(DType.BFLOAT16), AttentionCase("two", ((3, 700), (3, 256)), num_heads=2, num_kv_heads=1))
    q = normal(6, 2, 64)
    chunk = _attend(kernels, batch, q, slice(None), 3)
    decode = _attend(kernels, batch, q[2::3], slice(None), 1)
    np.testing.assert_array_equal(chunk[2::3], decode)


def test_sequences_without_a_query_pad_a_batch_of_decodes(kernels_float32: KernelSet) -> None:
    """As a recorded step of fixed size has them: as many tokens as sequences, the last ones nobody's."""
    batch = fill_cache(_torch(DType.FLOAT32), AttentionCase("decodes", ((1, 40), (1, 17))))
    padded = replace(
        batch,
        block_tables=np.concatenate((batch.block_tables, np.zeros((2, batch.block_tables.shape[1]), np.int32))),
        query_start_loc=np.array([0, 1, 2, 2, 2], np.int32),
        seq_lens=np.array([40, 17, 0, 0], np.int32),
    )
    q, held = put(kernels_float32, normal(4, 9, 64))
    out = kernels_float32.empty((4, 9, 64), DType.FLOAT32)
    run_attention(kernels_float32, padded, q, AttentionSpec(0.125), out)
    for row in range(2):
        expected = truth.attention(held[row : row + 1], batch.keys[row], batch.values[row], 0.125, None, None)
        np.testing.assert_allclose(kernels_float32.download(out)[row : row + 1], expected, atol=1e-5)


def test_blocks_beyond_two_to_the_31st_element(kernels_bfloat16: KernelSet) -> None:
    """The address of the last block does not fit in 32 bits."""
    spec = KVCacheSpec(1, 2**31 // (16 * 2 * 64) + 10, 16, 1, 64, 64, DType.BFLOAT16)
    cache = kernels_bfloat16.new_kv_cache(spec)
    last = spec.num_blocks - 1
    k, held_k = put(kernels_bfloat16, normal(20, 1, 64, seed=1))
    v, held_v = put(kernels_bfloat16, normal(20, 1, 64, seed=2))
    q, held_q = put(kernels_bfloat16, normal(20, 2, 64))
    block_of = np.where(np.arange(20) < 16, last, last - 7)
    slots = kernels_bfloat16.upload((block_of * 16 + np.arange(20) % 16).astype(np.int64))
    positions = kernels_bfloat16.upload(np.zeros(20, np.int32))
    kernels_bfloat16.rope_and_store_kv(q, k, v, positions, None, None, cache, 0, slots)
    kernels_bfloat16.copy_blocks(cache, np.array([last], np.int32), np.array([last - 1], np.int32))
    out = kernels_bfloat16.empty((20, 2, 64), DType.BFLOAT16)
    tables, starts, lengths = (
        kernels_bfloat16.upload(np.array(host, np.int32)) for host in ([[last - 1, last - 7]], [0, 20], [20])
    )
    kernels_bfloat16.paged_attention(q, cache, 0, tables, starts, lengths, AttentionSpec(0.125), out)
    expected = truth.attention(held_q, held_k, held_v, 0.125, None, None)
    np.testing.assert_allclose(kernels_bfloat16.download(out), expected, atol=2e-2)
