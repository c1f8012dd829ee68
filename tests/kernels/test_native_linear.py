"""Native products: bit for bit what the reference's arithmetic gives, row by row.

Without tiles weights with codes meet 8-bit activations in exact integer sums; with tiles (AMX) everything is bf16.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import formats
from kernels.interface import Activation, DType, HostWeight, KernelSet
from kernels.reference import quantized, tiles
from tests.kernels.cases import BLOCK_FORMATS, PLAIN_FORMATS, Floats, check_linear, host_weight, normal
from tests.kernels.native_cases import EVERY_ISA, EVERY_ISA_AND_THREADS, ISAS, kernels_for, linear, same_bits

OWN_BITS = ("Q8_0", "Q4_0", "Q4_1", "INT8", "INT4_G32", "INT4_G64", "INT4_G128")


def weight_of(name: str, rows: int, columns: int, seed: int = 0) -> HostWeight:
    if name in BLOCK_FORMATS or name in PLAIN_FORMATS:
        return host_weight(name, rows, columns, seed)[0]
    return formats.quantize(normal(rows, columns, seed=seed, scale=0.1), name)


def expected(isa: str, x: Floats, weight: HostWeight, bias: Floats | None = None) -> Floats:
    """The reference of the arithmetic that this instruction set has."""
    return tiles.linear(x, weight, bias) if isa == "amx" else quantized.linear(x, [weight], bias)


def outliers(rows: int, columns: int, seed: int = 0) -> Floats:
    """Activations as models have them: few very large, a group of zeros, tiny ones."""
    x = normal(rows, columns, seed=seed)
    x[:, :: max(1, columns // 5)] *= 300
    x[0, :32] = 0.0
    x[-1] *= 1e-6
    return x


@pytest.mark.parametrize(("isa", "threads"), EVERY_ISA_AND_THREADS)
@pytest.mark.parametrize("name", OWN_BITS)
def test_quantised_products_equal_the_reference_bit_for_bit(isa: str, threads: int, name: str) -> None:
    kernels = kernels_for(isa, threads, DType.BFLOAT16)
    for num_outputs, columns, num_rows in ((1, 128, 1), (33, 256, 3), (100, 640, 17), (16, 1536, 40)):
        weight, x = weight_of(name, num_outputs, columns), outliers(num_rows, columns)
        bias = normal(num_outputs, seed=9)
        actual = linear(kernels, x, kernels.pack_linear([weight], bias))
        same_bits(actual, expected(isa, x, weight, bias))


@pytest.mark.parametrize("isa", EVERY_ISA)
def test_per_channel_weights_take_any_number_of_inputs(isa: str) -> None:
    kernels = kernels_for(isa, 1, DType.BFLOAT16)
    for columns in (1, 31, 33, 100):
        weight, x = weight_of("INT8", 20, columns), outliers(5, columns)
        same_bits(linear(kernels, x, kernels.pack_linear([weight])), expected(isa, x, weight))


@settings(max_examples=40, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    name=st.sampled_from(OWN_BITS),
    num_rows=st.integers(1, 70),
    num_outputs=st.integers(1, 70),
    groups=st.integers(1, 6),
    threads=st.integers(1, 4),
)
def test_any_shape_equals_the_reference(
    isa: str, name: str, num_rows: int, num_outputs: int, groups: int, threads: int
) -> None:
    kernels = kernels_for(isa, threads, DType.BFLOAT16)
    weight, x = weight_of(name, num_outputs, 128 * groups, seed=groups), outliers(num_rows, 128 * groups, seed=1)
    same_bits(linear(kernels, x, kernels.pack_linear([weight])), expected(isa, x, weight))


@pytest.mark.parametrize(("isa", "threads"), EVERY_ISA_AND_THREADS)
def test_parts_of_different_formats_stand_side_by_side(isa: str, threads: int) -> None:
    """A fused projection whose parts a GGUF holds in different types, float ones among them."""
    kernels = kernels_for(isa, threads, DType.BFLOAT16)
    names = ("Q4_1", "F32", "Q8_0", "BF16", "Q4_0")
    parts = [weight_of(name, 24, 256, seed=i) for i, name in enumerate(names)]
    x = outliers(19, 256)
    actual = linear(kernels, x, kernels.pack_linear(parts))
    alone = [linear(kernels, x, kernels.pack_linear([part])) for part in parts]
    same_bits(actual, np.concatenate(alone, axis=1))


@pytest.mark.parametrize(("isa", "threads"), EVERY_ISA_AND_THREADS)
@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "INT4_G128"])
def test_a_row_does_not_depend_on_the_rows_beside_it(isa: str, threads: int, name: str) -> None:
    """Alone, in the middle of others, at the end of a tile: the same bits, from one thread too."""
    kernels, alone = kernels_for(isa, threads, DType.BFLOAT16), kernels_for(isa, 1, DType.BFLOAT16)
    weight = weight_of(name, 70, 384)
    packed, packed_alone = kernels.pack_linear([weight]), alone.pack_linear([weight])
    x = outliers(300, 384)
    rows = np.concatenate([linear(alone, x[r : r + 1], packed_alone) for r in range(len(x))])
    for first, last in ((0, 1), (0, 2), (3, 10), (1, 17), (0, 33), (7, 71), (0, 300)):
        same_bits(linear(kernels, x[first:last], packed), rows[first:last])


@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "INT8"])
def test_instruction_sets_agree_bit_for_bit(name: str) -> None:
    """In float32 all of them; at the weights' own bits those without tiles."""
    columns = 333 if name in ("F32", "INT8") else 320
    weight, x = weight_of(name, 50, columns), outliers(21, columns)
    for dtype, isas in ((DType.FLOAT32, ISAS), (DType.BFLOAT16, [isa for isa in ISAS if isa != "amx"])):
        results = [linear(k := kernels_for(isa, 1, dtype), x, k.pack_linear([weight])) for isa in isas]
        for result in results[1:]:
            same_bits(result, results[0])


@pytest.mark.skipif("amx" not in ISAS, reason="no tiles here")
def test_plain_weights_on_tiles_equal_the_reference_bit_for_bit() -> None:
    kernels = kernels_for("amx", 2, DType.BFLOAT16)
    for name, columns in (("BF16", 320), ("F32", 33), ("F16", 1)):
        weight, x, bias = weight_of(name, 50, columns), outliers(37, columns), normal(50, seed=3)
        same_bits(linear(kernels, x, kernels.pack_linear([weight], bias)), tiles.linear(x, weight, bias))


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("formats", [(name,) for name in (*PLAIN_FORMATS, *BLOCK_FORMATS)] + [("F32", "Q4_K", "Q8_0")])
def test_float32_products_equal_the_formula(isa: str, formats: tuple[str, ...]) -> None:
    """With dtype float32 every format is dequantised and nothing is rounded."""
    for num_tokens in (1, 9):
        check_linear(kernels_for(isa), formats, num_tokens, with_bias=True, wide_out=True)


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("name", ["BF16", "Q6_K", "Q8_0", "Q4_1"])
def test_errors_stay_near_what_the_bits_allow(isa: str, name: str) -> None:
    """bf16 weights are rounded once; 8-bit activations cost about 1/254 of a group's largest."""
    kernels = kernels_for(isa, 2, DType.BFLOAT16)
    weight, values = host_weight(name, 64, 512)
    x = normal(10, 512)
    truth = x.astype(np.float64) @ values.astype(np.float64).T
    error = np.abs(linear(kernels, x, kernels.pack_linear([weight])) - truth).max() / np.abs(truth).max()
    assert error < (0.004 if name in ("BF16", "Q6_K") else 0.02)


@pytest.mark.parametrize("isa", EVERY_ISA)
def test_a_nan_stays_in_its_row(isa: str) -> None:
    kernels = kernels_for(isa, 1, DType.BFLOAT16)
    for name in ("Q4_1", "Q8_0", "BF16"):
        packed = kernels.pack_linear([weight_of(name, 20, 128)])
        x = normal(3, 128)
        clean = linear(kernels, x, packed)
        x[1, 5] = np.nan
        got = linear(kernels, x, packed)
        assert np.isnan(got[1]).all()
        same_bits(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("name", [*PLAIN_FORMATS, *OWN_BITS, "Q6_K"])
def test_embedding_reads_rows_of_the_packed_weight(isa: str, name: str) -> None:
    weight = weight_of(name, 37, 256)
    values = formats.dequantize(weight)
    ids = np.array([0, 36, 17, 17, 5], np.int32)
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        kernels = kernels_for(isa, 2, dtype)
        packed = kernels.pack_linear([weight])
        out = kernels.empty((5, 256), DType.FLOAT32)
        kernels.embedding(kernels.upload(ids), packed, out, 2.0)
        # floats are rounded to bfloat16 where the weights are kept in it
        tolerance = 2e-2 if dtype is DType.BFLOAT16 else 1e-6
        np.testing.assert_allclose(out, 2.0 * values[ids], rtol=tolerance, atol=1e-6)
        kernels.embedding(kernels.upload(ids), packed, out, 1.0, accumulate=True)
        np.testing.assert_allclose(out, 3.0 * values[ids], rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize(("isa", "threads"), EVERY_ISA_AND_THREADS)
@pytest.mark.parametrize("parts", [("Q4_1", "Q4_1"), ("Q8_0", "Q4_0"), ("F32", "BF16"), ("Q4_0",)])
def test_a_gated_mlp_equals_its_three_operations_bit_for_bit(isa: str, threads: int, parts: tuple[str, ...]) -> None:
    """Whatever is done together; also for widths that end within a strip, and in float32."""
    for dtype, width, rows in ((DType.BFLOAT16, 160, 1), (DType.BFLOAT16, 352, 33), (DType.FLOAT32, 96, 5)):
        kernels = kernels_for(isa, threads, dtype)
        size = 2 * width // len(parts)
        up = kernels.pack_linear([weight_of(name, size, 96, seed=i) for i, name in enumerate(parts)])
        down = kernels.pack_linear([weight_of("Q4_1", 70, width, seed=9)])
        x = kernels.upload(outliers(rows, 96))
        gate_up, activated = (
            kernels.empty((rows, 2 * width), DType.FLOAT32),
            kernels.empty((rows, width), DType.FLOAT32),
        )
        apart, together = kernels.empty((rows, 70), DType.FLOAT32), kernels.empty((rows, 70), DType.FLOAT32)
        KernelSet.gated_mlp(kernels, x, up, Activation.SILU, down, gate_up, activated, apart)
        kernels.gated_mlp(x, up, Activation.SILU, down, gate_up, activated, together)
        same_bits(together, apart)


def test_weights_that_cannot_be_are_refused() -> None:
    kernels = kernels_for("portable", 1, DType.BFLOAT16)
    with pytest.raises(ValueError, match="differ in their number of columns"):
        kernels.pack_linear([weight_of("F32", 3, 64), weight_of("F32", 3, 32)])
    with pytest.raises(ValueError, match="bias"):
        kernels.pack_linear([weight_of("F32", 3, 64)], np.zeros(4, np.float32))
    packed = kernels.pack_linear([weight_of("F32", 3, 64)])
    with pytest.raises(ValueError, match="x: wrong width"):
        kernels.linear(np.zeros((1, 63), np.float32), packed, np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="out: wrong shape"):
        kernels.linear(np.zeros((2, 64), np.float32), packed, np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="wrong element type"):
        kernels.linear(np.zeros((1, 64), np.float64), packed, np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="not contiguous"):
        kernels.linear(np.zeros((1, 128), np.float32)[:, ::2], packed, np.zeros((1, 3), np.float32))
