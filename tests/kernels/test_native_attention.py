"""Native attention: narrow caches, and rows that do not depend on how a step is cut."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kernels.interface import Array, AttentionSpec, DType, KVCacheSpec
from kernels.native.native_kernels import NativeKernels
from tests.kernels import truth
from tests.kernels.cases import ATTENTION_CASES, AttentionCase, Floats, normal
from tests.kernels.native_cases import EVERY_ISA, EVERY_ISA_AND_THREADS, ISAS, kernels_for, same_bits

SPEC = AttentionSpec(0.125)
KV_TYPES = [DType.FLOAT32, DType.BFLOAT16, DType.INT8]


@dataclass(frozen=True)
class Context:
    """Sequences whose keys and values are in a cache of one layer, blocks in random order."""

    kernels: NativeKernels
    cache: Array
    spec: KVCacheSpec
    tables: npt.NDArray[np.int32]
    keys: list[Floats]  # as the cache holds them
    values: list[Floats]
    stored: list[tuple[Floats, Floats]]  # as they were given

    def attend(self, q: Floats, seqs: list[int], counts: list[int], lengths: list[int], spec: AttentionSpec) -> Floats:
        """Sequence seqs[i] has counts[i] queries, the last of which sees lengths[i] keys."""
        out = self.kernels.empty((len(q), q.shape[1], self.spec.value_head_dim), DType.FLOAT32)
        self.kernels.paged_attention(
            self.kernels.upload(q),
            self.cache,
            0,
            self.kernels.upload(self.tables[seqs]),
            self.kernels.upload(np.cumsum([0, *counts]).astype(np.int32)),
            self.kernels.upload(np.array(lengths, np.int32)),
            spec,
            out,
        )
        return np.array(out, np.float32)


def context(kernels: NativeKernels, dtype: DType, case: AttentionCase, poison: bool = True) -> Context:
    """With `poison`, slots that no sequence owns hold NaN."""
    random = np.random.default_rng(3)
    lengths = [length for _, length in case.sequences]
    counts = [-(-length // case.block_size) for length in lengths]
    num_blocks = sum(counts) + 2
    value_dim = case.value_head_dim or case.head_dim
    spec = KVCacheSpec(1, num_blocks, case.block_size, case.num_kv_heads, case.head_dim, value_dim, dtype)
    cache = kernels.new_kv_cache(spec)

    def store(k: Floats, v: Floats, slots: npt.NDArray[np.int64]) -> None:
        q = kernels.empty((len(k), case.num_kv_heads, case.head_dim), DType.FLOAT32)
        positions = kernels.upload(np.zeros(len(k), np.int32))
        kernels.rope_and_store_kv(q, kernels.upload(k), kernels.upload(v), positions, None, None, cache, 0, slots)

    if poison:
        slots = np.arange(case.block_size, num_blocks * case.block_size, dtype=np.int64)
        nan = np.full((len(slots), case.num_kv_heads, max(case.head_dim, value_dim)), np.nan, np.float32)
        store(nan[..., : case.head_dim].copy(), nan[..., :value_dim].copy(), slots)
    blocks = random.permutation(np.arange(1, num_blocks)).tolist()
    tables = np.full((len(lengths), max(counts)), 2**30, np.int32)
    keys, values, stored = [], [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = [blocks.pop() for _ in range(count)]
        where = np.arange(length)
        slots = tables[row, where // case.block_size].astype(np.int64) * case.block_size + where % case.block_size
        k = random.standard_normal((length, case.num_kv_heads, case.head_dim)).astype(np.float32)
        v = random.standard_normal((length, case.num_kv_heads, value_dim)).astype(np.float32)
        store(k, v, slots)
        keys.append(held(k, dtype))
        values.append(held(v, dtype))
        stored.append((k, v))
    return Context(kernels, cache, spec, tables, keys, values, stored)


def held(x: Floats, dtype: DType) -> Floats:
    """Values as a cache of this type holds them."""
    if dtype is DType.FLOAT32:
        return x
    if dtype is DType.BFLOAT16:
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    top: Floats = np.abs(x).max(axis=-1, keepdims=True)
    codes: Floats = np.rint(x * (np.float32(127) / top))
    return codes * (top / np.float32(127))


def spec_of(case: AttentionCase) -> AttentionSpec:
    return AttentionSpec(case.head_dim**-0.5, case.window, case.soft_cap)


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("case", [c for c in ATTENTION_CASES if c.sequences], ids=lambda case: case.name)
def test_equals_the_formula_on_what_the_cache_holds(isa: str, dtype: DType, case: AttentionCase) -> None:
    """Beyond the cache's own rounding at most what bfloat16 probabilities and queries cost."""
    there = context(kernels_for(isa, 2), dtype, case)
    counts, lengths = zip(*case.sequences, strict=True)
    q = normal(sum(counts), case.num_heads, case.head_dim, seed=1)
    out = there.attend(q, list(range(len(counts))), list(counts), list(lengths), spec_of(case))
    first = 0
    for row, count in enumerate(counts):
        expected = truth.attention(
            q[first : first + count],
            there.keys[row],
            there.values[row],
            case.head_dim**-0.5,
            case.window,
            case.soft_cap,
        )
        tolerance = 2e-5 if dtype is DType.FLOAT32 else 1e-2
        np.testing.assert_allclose(out[first : first + count], expected, atol=tolerance * np.abs(expected).max())
        first += count


@pytest.mark.parametrize(("isa", "threads"), EVERY_ISA_AND_THREADS)
@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("window", [None, 50])
def test_a_query_does_not_depend_on_how_the_step_is_cut(
    isa: str, threads: int, dtype: DType, window: int | None
) -> None:
    """Whole prompt, chunks of any size, one query at a time, beside other sequences: the same bits."""
    length = 700 if isa == ISAS[-1] else 290
    case = AttentionCase("", ((length, length), (5, 333), (1, 290)), window=window)
    there = context(kernels_for(isa, threads), dtype, case)
    spec = spec_of(case)
    q = normal(length, 9, 64, seed=5)
    whole = there.attend(q, [0], [length], [length], spec)
    for chunk in (1, 16, 100, 511):
        starts = range(0, length, chunk) if chunk > 1 else (0, 1, 15, 16, 255, 256, 257, length - 1)
        for start in starts:
            end = min(length, start + chunk)
            same_bits(there.attend(q[start:end], [0], [end - start], [end], spec), whole[start:end])
    others = normal(6, 9, 64, seed=6)
    for start, end in ((0, length), (length - 1, length), (250, 271)):
        mixed = np.concatenate([others[:5], q[start:end], others[5:]])
        out = there.attend(mixed, [1, 0, 2], [5, end - start, 1], [333, end, 290], spec)
        same_bits(out[5 : 5 + end - start], whole[start:end])


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_instruction_sets_without_tiles_agree_bit_for_bit(dtype: DType) -> None:
    case = AttentionCase("", ((40, 600), (1, 300)), soft_cap=20.0)
    q = normal(41, 9, 64, seed=2)
    results = [
        context(kernels_for(isa), dtype, case).attend(q, [0, 1], [40, 1], [600, 300], spec_of(case))
        for isa in ISAS
        if isa != "amx"
    ]
    for result in results[1:]:
        same_bits(result, results[0])


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.INT8])
def test_a_nan_in_one_sequence_leaves_the_others_as_they_were(isa: str, dtype: DType) -> None:
    case = AttentionCase("", ((1, 40), (1, 35), (20, 48)))
    there = context(kernels_for(isa), dtype, case)
    q = normal(22, 9, 64)
    clean = there.attend(q, [0, 1, 2], [1, 1, 20], [40, 35, 48], SPEC)
    q[1] = np.nan
    poisoned = there.attend(q, [0, 1, 2], [1, 1, 20], [40, 35, 48], SPEC)
    assert np.isnan(poisoned[1]).all()
    rest = [0, *range(2, 22)]
    same_bits(poisoned[rest], clean[rest])


@pytest.mark.parametrize("isa", EVERY_ISA)
def test_scratch_memory_does_not_grow_with_the_square_of_the_length(isa: str) -> None:
    """A chunk at the end of 6,000 tokens, against the formula."""
    case = AttentionCase("", ((300, 6000),), num_heads=1, num_kv_heads=1, head_dim=8)
    there = context(kernels_for(isa), DType.BFLOAT16, case)
    q = normal(300, 1, 8, seed=1)
    out = there.attend(q, [0], [300], [6000], AttentionSpec(8**-0.5))
    expected = truth.attention(q, there.keys[0], there.values[0], 8**-0.5, None, None)
    np.testing.assert_allclose(out, expected, atol=2e-2 * np.abs(expected).max())


def test_caches_that_cannot_be_are_refused() -> None:
    kernels = kernels_for("portable")
    for spec, message in (
        (KVCacheSpec(1, 2, 16, 1, 8, 8, DType.FLOAT16), "not float16"),
        (KVCacheSpec(1, 2, 257, 1, 8, 8, DType.FLOAT32), "block_size"),
        (KVCacheSpec(1, 2, 16, 1, 513, 8, DType.FLOAT32), "head sizes"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.new_kv_cache(spec)
