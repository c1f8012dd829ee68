"""Cases and checks that every backend must pass: `check_…(kernels, …)` runs an operation and compares it with truth.py.

Tolerances are relative to the largest value of the truth: float32 accumulates rounding along a row, bfloat16 has
8 significant bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kernels.interface import Activation, Array, AttentionSpec, DType, HostWeight, KernelSet, KVCacheSpec, RopeSpec
from tests.kernels import truth

TOLERANCE = {DType.FLOAT32: 2e-5, DType.FLOAT16: 2.5e-3, DType.BFLOAT16: 2e-2}
Floats = npt.NDArray[np.float32]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Floats:
    return (rng(seed).standard_normal(shape) * scale).astype(np.float32)


def put(kernels: KernelSet, host: npt.NDArray[Any]) -> tuple[Array, Floats]:
    """An array of the activations' type, and its values as that type holds them."""
    array = kernels.upload(host.copy(), kernels.activation_dtype)
    return array, kernels.download(array)


def assert_close(kernels: KernelSet, actual: Array, expected: npt.NDArray[np.float64], factor: float = 1.0) -> None:
    got = kernels.download(actual)
    assert got.shape == expected.shape
    bound = TOLERANCE[kernels.activation_dtype] * factor * max(1e-6, float(np.abs(expected).max(initial=0.0)))
    worst = float(np.abs(got - expected).max(initial=0.0))
    assert worst <= bound, f"off by {worst:.3g}, allowed {bound:.3g}"


# -- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionCase:
    """`sequences`: (queries, tokens visible to the last one)."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    value_head_dim: int | None = None
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    num_padding: int = 0  # tokens after the last sequence


AWKWARD = ((1, 1328), (5, 18), (129, 463))
ATTENTION_CASES = (
    AttentionCase("one token alone", ((1, 1),)),
    AttentionCase("a whole prompt", ((37, 37),)),
    AttentionCase("chunks and a decode in one call", AWKWARD),
    AttentionCase("decodes of many lengths", tuple((1, n) for n in (1, 2, 15, 16, 17, 33, 500, 501, 64, 3))),
    AttentionCase("decodes of one length", tuple((1, 48) for _ in range(7))),
    AttentionCase("exactly a block, one less, one more", ((16, 16), (1, 16), (15, 15), (17, 17), (1, 17), (16, 32))),
    AttentionCase("five heads on one", AWKWARD, num_heads=5, num_kv_heads=1),
    AttentionCase("as many KV heads as heads", AWKWARD, num_heads=4, num_kv_heads=4, head_dim=32),
    AttentionCase("a window inside a block", AWKWARD, window=7),
    AttentionCase("a window of blocks", AWKWARD, window=32),
    AttentionCase("a window of one", AWKWARD, window=1),
    AttentionCase("a window wider than all", AWKWARD, window=5000),
    AttentionCase("decodes through a window", tuple((1, n) for n in (1, 63, 64, 65, 66, 300, 80)), window=64),
    AttentionCase("soft cap", AWKWARD, soft_cap=2.0),
    AttentionCase("soft cap and window", AWKWARD, window=100, soft_cap=2.0),
    AttentionCase("values narrower than keys", AWKWARD, num_heads=4, num_kv_heads=2, head_dim=24, value_head_dim=16),
    AttentionCase("blocks of eight, heads of 80", AWKWARD, num_heads=6, num_kv_heads=2, head_dim=80, block_size=8),
    AttentionCase("padding after the last sequence", AWKWARD, num_padding=3),
    AttentionCase("no sequence", ()),
)


@dataclass(frozen=True)
class PagedBatch:
    """A cache filled with random keys and values, and the index arrays of a step over it."""

    spec: KVCacheSpec
    cache: Array
    block_tables: npt.NDArray[np.int32]
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    keys: list[Floats]  # per sequence, as the cache holds them
    values: list[Floats]


LAYER, NUM_LAYERS = 1, 3


def fill_cache(kernels: KernelSet, case: AttentionCase, seed: int = 0, kv_dtype: DType | None = None) -> PagedBatch:
    """Blocks in random order; what tables do not name, and slots past a sequence's end, hold a NaN."""
    random = rng(seed)
    lengths = [length for _, length in case.sequences]
    blocks_of = [-(-length // case.block_size) for length in lengths]
    num_blocks = 1 + sum(blocks_of) + 2
    spec = KVCacheSpec(
        NUM_LAYERS,
        num_blocks,
        case.block_size,
        case.num_kv_heads,
        case.head_dim,
        case.value_head_dim or case.head_dim,
        kv_dtype or kernels.kv_dtype,
    )
    cache = kernels.new_kv_cache(spec)
    all_slots = np.arange(case.block_size, num_blocks * case.block_size, dtype=np.int64)
    _store(kernels, spec, cache, np.full((len(all_slots), 1), np.nan, np.float32), None, all_slots)
    order = random.permutation(np.arange(1, num_blocks)).astype(np.int32)
    tables = np.full((len(lengths), max(blocks_of, default=0) + 1), 2**30, np.int32)  # past the end: undefined
    keys, values = [], []
    for row, (length, count) in enumerate(zip(lengths, blocks_of, strict=True)):
        tables[row, :count], order = order[:count], order[count:]
        positions = np.arange(length)
        slots = tables[row, positions // case.block_size].astype(np.int64) * case.block_size
        slots += positions % case.block_size
        k, held_k = put(kernels, random.standard_normal((length, spec.num_kv_heads, spec.head_dim)))
        v, held_v = put(kernels, random.standard_normal((length, spec.num_kv_heads, spec.value_head_dim)))
        _store(kernels, spec, cache, k, v, slots)
        keys.append(held_k)
        values.append(held_v)
    starts = np.cumsum([0, *[queries for queries, _ in case.sequences]]).astype(np.int32)
    return PagedBatch(spec, cache, tables, starts, np.array(lengths, np.int32), keys, values)


def _store(
    kernels: KernelSet, spec: KVCacheSpec, cache: Array, k: Any, v: Array | None, slots: npt.NDArray[np.int64]
) -> None:
    """Store k and v as they are; a host column k is spread over all heads of both."""
    if v is None:
        shape = (len(slots), spec.num_kv_heads)
        k, v = (
            put(kernels, np.broadcast_to(k[:, :, None], (*shape, width)))[0]
            for width in (spec.head_dim, spec.value_head_dim)
        )
    q = kernels.empty((len(slots), spec.num_kv_heads, spec.head_dim), kernels.activation_dtype)
    positions = kernels.upload(np.zeros(len(slots), np.int32))
    kernels.rope_and_store_kv(q, k, v, positions, None, None, cache, LAYER, kernels.upload(slots))


def check_attention(
    kernels: KernelSet, case: AttentionCase, kv_dtype: DType | None = None, factor: float = 1.0
) -> None:
    """`factor` widens the tolerance."""
    batch = fill_cache(kernels, case, kv_dtype=kv_dtype)
    num_tokens = int(batch.query_start_loc[-1]) + case.num_padding
    q, held_q = put(kernels, normal(num_tokens, case.num_heads, case.head_dim, seed=1))
    out = kernels.empty((num_tokens, case.num_heads, batch.spec.value_head_dim), kernels.activation_dtype)
    spec = AttentionSpec(case.head_dim**-0.5, case.window, case.soft_cap)
    run_attention(kernels, batch, q, spec, out)
    for row, (first, last) in enumerate(itertools.pairwise(batch.query_start_loc)):
        expected = truth.attention(
            held_q[first:last], batch.keys[row], batch.values[row], spec.scale, case.window, case.soft_cap
        )
        assert_close(kernels, out[int(first) : int(last)], expected, factor)


def run_attention(kernels: KernelSet, batch: PagedBatch, q: Array, spec: AttentionSpec, out: Array) -> None:
    kernels.paged_attention(
        q,
        batch.cache,
        LAYER,
        kernels.upload(batch.block_tables),
        kernels.upload(batch.query_start_loc),
        kernels.upload(batch.seq_lens),
        spec,
        out,
    )


# -- rotation -------------------------------------------------------------------------------------------------------


def cos_sin_table(length: int, rotary_dim: int, base: float = 10000.0) -> Floats:
    frequencies = base ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.arange(length)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def rotate(
    kernels: KernelSet, x: npt.NDArray[Any], positions: npt.NDArray[np.int32], table: Floats, spec: RopeSpec
) -> Floats:
    """x [T, heads, D] through rope_and_store_kv as queries; nothing is stored. As the activations' type holds it."""
    q, k = put(kernels, x)[0], put(kernels, x)[0]
    cache_spec = KVCacheSpec(1, 2, 16, x.shape[1], x.shape[2], x.shape[2], kernels.activation_dtype)
    kernels.rope_and_store_kv(
        q,
        k,
        put(kernels, x)[0],
        kernels.upload(positions),
        kernels.upload(table),
        spec,
        kernels.new_kv_cache(cache_spec),
        0,
        kernels.upload(np.full(len(positions), -1, np.int64)),
    )
    rotated = kernels.download(q)
    np.testing.assert_array_equal(rotated, kernels.download(k))
    return rotated


# -- weights --------------------------------------------------------------------------------------------------------

PLAIN_FORMATS = ("F32", "F16", "BF16")
# where a block keeps its half-precision scales; the rest may be any bytes
_SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
BLOCK_FORMATS = tuple(_SCALES)


def host_weight(format: str, rows: int, columns: int, seed: int = 0) -> tuple[HostWeight, Floats]:
    """A random weight in a file's format, and its values."""
    if format in PLAIN_FORMATS:
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[format]
        data: npt.NDArray[Any] = normal(rows, columns, seed=seed, scale=0.1).astype(dtype)
        return HostWeight(format, data, rows, columns), data.astype(np.float32)
    kind = GGMLQuantizationType[format]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    random = rng(seed)
    blocks = random.integers(0, 256, (rows * columns // block, block_bytes), dtype=np.uint8)
    for offset in _SCALES[format]:
        scales = random.uniform(0.002, 0.02, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    data = blocks.reshape(rows, -1)
    return HostWeight(format, data, rows, columns), dequantize(data, kind).astype(np.float32)


def check_linear(kernels: KernelSet, formats: Sequence[str], num_tokens: int, with_bias: bool, wide_out: bool) -> None:
    """One part of 33 outputs per format; x is a slice of wider rows."""
    columns = 512
    parts, values = zip(*[host_weight(f, 33, columns, seed=i) for i, f in enumerate(formats)], strict=True)
    weight = np.concatenate(values)
    bias = normal(len(weight), seed=7) if with_bias else None
    packed = kernels.pack_linear(parts, bias)
    wide, held = put(kernels, normal(num_tokens, columns + 8, seed=3))
    out = kernels.empty((num_tokens, len(weight)), DType.FLOAT32 if wide_out else kernels.activation_dtype)
    kernels.linear(wide[:, :columns], packed, out)
    expected = held[:, :columns].astype(np.float64) @ weight.astype(np.float64).T
    assert_close(kernels, out, expected + (0.0 if bias is None else bias))


# -- tokens alone ---------------------------------------------------------------------------------------------------


def check_rms_norm(kernels: KernelSet, num_tokens: int, width: int) -> None:
    x, held = put(kernels, normal(num_tokens, width))
    out = kernels.empty((num_tokens, width), kernels.activation_dtype)
    weight = normal(width, seed=1)
    kernels.rms_norm(x, kernels.pack_vector(weight), 1e-5, out)
    assert_close(kernels, out, truth.rms_norm(held, weight, 1e-5))
    np.testing.assert_array_equal(kernels.download(x), held)


def check_norm_adds_to_the_residual(kernels: KernelSet, layer_norm: bool) -> None:
    x, held_x = put(kernels, normal(5, 96))
    residual, held_residual = put(kernels, normal(5, 96, seed=1))
    out = kernels.empty((5, 96), kernels.activation_dtype)
    weight, bias = normal(96, seed=2), normal(96, seed=3)
    packed = kernels.pack_vector(weight)
    if layer_norm:
        kernels.layer_norm(x, packed, kernels.pack_vector(bias), 1e-5, out, residual)
    else:
        kernels.rms_norm(x, packed, 1e-5, out, residual)
    assert_close(kernels, residual, held_x.astype(np.float64) + held_residual)
    total = kernels.download(residual)  # as the residual's type holds the sum
    expected = truth.layer_norm(total, weight, bias, 1e-5) if layer_norm else truth.rms_norm(total, weight, 1e-5)
    assert_close(kernels, out, expected)


def check_norm_per_head_in_place(kernels: KernelSet) -> None:
    """The heads of a slice of wider rows, as the q norm of a fused projection has them."""
    qkv, held = put(kernels, normal(7, 4 * 32 + 64))
    weight = normal(32, seed=1)
    heads = qkv[:, : 4 * 32].reshape(7, 4, 32)
    kernels.rms_norm(heads, kernels.pack_vector(weight), 1e-6, heads)
    expected = truth.rms_norm(held[:, : 4 * 32].reshape(7, 4, 32), weight, 1e-6).reshape(7, -1)
    assert_close(kernels, qkv[:, : 4 * 32], expected)
    np.testing.assert_array_equal(kernels.download(qkv)[:, 4 * 32 :], held[:, 4 * 32 :])


def check_gated_activation(kernels: KernelSet, activation: Activation) -> None:
    gate_up, held = put(kernels, normal(6, 2 * 80, scale=3.0))
    out = kernels.empty((6, 80), kernels.activation_dtype)
    kernels.gated_activation(gate_up, activation, out)
    assert_close(kernels, out, truth.activate(held[:, :80], activation) * held[:, 80:])


def check_activation_in_place(kernels: KernelSet, activation: Activation) -> None:
    x, held = put(kernels, normal(6, 80, scale=3.0))
    kernels.activation(x, activation, x)
    assert_close(kernels, x, truth.activate(held, activation))


def check_add_gated(kernels: KernelSet, num_tokens: int, width: int) -> None:
    """x and y are slices of wider rows, which stay as they were; gates reach from shut to open."""
    x, held_x = put(kernels, normal(num_tokens, width + 5))
    y, held_y = put(kernels, normal(num_tokens, width + 8, seed=1))
    gate = np.linspace(-200.0, 200.0, num_tokens, dtype=np.float32)[:, None]
    kernels.add_gated(x[:, :width], y[:, 8:], kernels.upload(gate))
    expected = held_x.astype(np.float64)
    expected[:, :width] += truth.sigmoid(gate) * held_y[:, 8:]
    assert_close(kernels, x, expected)
    np.testing.assert_array_equal(kernels.download(x)[:, width:], held_x[:, width:])
    np.testing.assert_array_equal(kernels.download(y), held_y)
