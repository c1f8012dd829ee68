"""Attention over 8-bit caches: bit for bit what the reference's arithmetic gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.interface import DType
from kernels.reference import exact_attention
from kernels.reference.kv_cache import quantise
from tests.kernels.cases import AttentionCase, Floats, normal
from tests.kernels.native_cases import EVERY_ISA_AND_THREADS, ISAS, kernels_for, same_bits
from tests.kernels.test_native_attention import Context, context, spec_of

CASES = (
    AttentionCase("a prompt", ((37, 37),)),
    AttentionCase("a chunk and decodes over several partitions", ((20, 600), (1, 513), (1, 1), (1, 17))),
    AttentionCase("a window and a soft cap", ((40, 300), (1, 290)), window=50, soft_cap=2.0),
    AttentionCase("odd sizes", ((9, 40), (1, 33)), num_heads=4, num_kv_heads=2, head_dim=23, value_head_dim=17),
    AttentionCase(
        "blocks of eight, heads of 80", ((5, 300), (1, 77)), num_heads=6, num_kv_heads=2, head_dim=80, block_size=8
    ),
    AttentionCase("blocks of 32", ((3, 300), (1, 77)), num_heads=2, num_kv_heads=1, head_dim=32, block_size=32),
)


def expected(there: Context, case: AttentionCase, row: int, q: Floats, length: int, isa: str) -> Floats:
    """Queries q [n, heads, D], the last of which sees `length` keys of sequence `row`."""
    k, v = there.stored[row]
    group = case.num_heads // case.num_kv_heads
    positions = np.repeat(np.arange(length - len(q), length, dtype=np.int32), group)
    outputs = [
        exact_attention.attend(
            q[:, head * group : (head + 1) * group].reshape(-1, case.head_dim),
            positions,
            exact_attention.quantize(k[:length, head]),
            exact_attention.quantize(v[:length, head]),
            spec_of(case),
            case.block_size,
            on_tiles=isa == "amx",
        )
        for head in range(case.num_kv_heads)
    ]
    return np.concatenate([out.reshape(len(q), group, -1) for out in outputs], axis=1)


def check(isa: str, threads: int, case: AttentionCase) -> None:
    there = context(kernels_for(isa, threads), DType.INT8, case)
    counts, lengths = (list(part) for part in zip(*case.sequences, strict=True))
    q = normal(sum(counts), case.num_heads, case.head_dim, seed=1)
    out = there.attend(q, list(range(len(counts))), counts, lengths, spec_of(case))
    first = 0
    for row, (count, length) in enumerate(case.sequences):
        same_bits(out[first : first + count], expected(there, case, row, q[first : first + count], length, isa))
        first += count


@pytest.mark.parametrize(("isa", "threads"), EVERY_ISA_AND_THREADS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference_bit_for_bit(isa: str, threads: int, case: AttentionCase) -> None:
    if threads > 1 and case.sequences[0][1] < 300:
        threads = 2
    check(isa, threads, case)


@settings(max_examples=15, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    num_queries=st.integers(1, 20),
    head_dim=st.integers(1, 70),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    window=st.one_of(st.none(), st.integers(1, 300)),
    block_size=st.sampled_from([4, 16, 48]),
)
def test_any_shape_equals_the_reference(
    isa: str,
    threads: int,
    lengths: list[int],
    num_queries: int,
    head_dim: int,
    heads: tuple[int, int],
    window: int | None,
    block_size: int,
) -> None:
    sequences = tuple((min(length, num_queries), length) for length in lengths)
    check(isa, threads, AttentionCase("", sequences, *heads, head_dim, None, block_size, window))


def test_the_torch_reference_keeps_the_same_codes_and_scales() -> None:
    x = normal(50, 3, 64, seed=4) * np.geomspace(1e-6, 1e6, 50, dtype=np.float32)[:, None, None]
    x[3, 1] = 0.0
    codes, scales = quantise(torch.from_numpy(x))
    exact = exact_attention.quantize(x.reshape(-1, 64))
    np.testing.assert_array_equal(codes.numpy().reshape(-1, 64), exact.codes)
    np.testing.assert_array_equal(scales.numpy().ravel(), exact.scales)
