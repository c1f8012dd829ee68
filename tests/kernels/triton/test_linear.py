"""Products with weights of every kind, embeddings and experts in Triton: the reference's own tests, and codes' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import formats
from kernels.interface import DType, KernelSet
from kernels.triton import quantized_linear
from tests.kernels.cases import assert_close, check_linear, host_weight, normal, put
from tests.kernels.test_reference_linear import (  # noqa: F401
    test_each_token_goes_through_its_own_experts,
    test_embedding_scales_and_accumulates,
    test_no_token_through_experts,
)
from tests.kernels.triton.conftest import DEVICE


@pytest.fixture(scope="module")
def reference(kernels: KernelSet) -> KernelSet:
    return kernels


@pytest.mark.parametrize(
    ("num_tokens", "with_bias", "wide_out"), [(0, True, False), (1, False, True), (2, True, True), (65, True, False)]
)
def test_linear_of_stacked_parts(kernels: KernelSet, num_tokens: int, with_bias: bool, wide_out: bool) -> None:
    check_linear(kernels, ["Q4_1", "F32", "Q8_0"], num_tokens, with_bias, wide_out)


# format, inputs (whole groups, or not; an odd number of them), outputs (a tile's edge), tokens
CASES = (
    ("Q4_0", 96, 64, 1),
    ("Q4_0", 1120, 65, 17),
    ("Q4_1", 352, 70, 16),
    ("Q4_1", 1088, 63, 3),
    ("Q8_0", 544, 1, 5),
    ("Q8_0", 32, 130, 64),
    ("INT8", 100, 66, 2),
    ("INT8", 1000, 5, 65),
    ("INT4_G32", 1000, 20, 1),
    ("INT4_G64", 320, 64, 33),
    ("INT4_G128", 600, 127, 8),
    ("INT4_G128", 1024, 64, 16),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_times_activations(kernels: KernelSet, case: tuple[str, int, int, int]) -> None:
    """float32 results equal the product of the codes' values to float32's precision, whatever the activations' type."""
    format, columns, rows, num_tokens = case
    weight = formats.quantize(normal(rows, columns, scale=0.1), format) if format.startswith("INT") else None
    weight = weight or host_weight(format, rows, columns)[0]
    x, held = put(kernels, normal(num_tokens, columns, seed=3))
    bias = normal(rows, seed=4)
    out = kernels.empty((num_tokens, rows), DType.FLOAT32)
    kernels.linear(x, kernels.pack_linear([weight], bias), out)
    expected = held.astype(np.float64) @ formats.dequantize(weight).astype(np.float64).T + bias
    np.testing.assert_allclose(kernels.download(out), expected, atol=2e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("format", ["Q4_1", "INT4_G64"])
def test_many_tokens_go_through_the_library(
    kernels_bfloat16: KernelSet, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """More outputs than are written down at once."""
    monkeypatch.setattr(quantized_linear, "_WRITTEN_AT_ONCE", 64 * 13)
    weight = host_weight("Q4_1", 40, 64)[0] if format == "Q4_1" else formats.quantize(normal(40, 64), format)
    num_tokens = quantized_linear._MANY_TOKENS + 1
    x, held = put(kernels_bfloat16, normal(num_tokens, 64))
    out = kernels_bfloat16.empty((num_tokens, 40), DType.BFLOAT16)
    kernels_bfloat16.linear(x, kernels_bfloat16.pack_linear([weight], normal(40, seed=2)), out)
    expected = held.astype(np.float64) @ formats.dequantize(weight).astype(np.float64).T + normal(40, seed=2)
    assert_close(kernels_bfloat16, out, expected)


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q8_0", "INT8", "INT4_G32", "INT4_G128"])
def test_rows_of_codes(kernels_float32: KernelSet, format: str) -> None:
    """Exactly the values of the format."""
    weight = (
        formats.quantize(normal(30, 1100), format) if format.startswith("INT") else host_weight(format, 30, 1120)[0]
    )
    ids = np.array([29, 0, 7, 29], np.int32)
    out = kernels_float32.empty((4, weight.columns), DType.FLOAT32)
    kernels_float32.embedding(kernels_float32.upload(ids), kernels_float32.pack_linear([weight]), out)
    np.testing.assert_array_equal(kernels_float32.download(out), formats.dequantize(weight)[ids])


def test_an_embedding_of_stacked_parts(kernels_float32: KernelSet) -> None:
    parts = [host_weight(format, 10, 64, seed=i) for i, format in enumerate(("Q4_1", "F32", "Q8_0"))]
    values = np.concatenate([value for _, value in parts])
    packed = kernels_float32.pack_linear([part for part, _ in parts])
    ids = np.array([0, 9, 10, 19, 20, 29], np.int32)
    out = kernels_float32.upload(np.ones((6, 64), np.float32))
    kernels_float32.embedding(kernels_float32.upload(ids), packed, out, scale=3.0, accumulate=True)
    np.testing.assert_allclose(kernels_float32.download(out), 1 + 3 * values[ids], rtol=1e-6)


def test_codes_are_counted_as_they_are_kept(kernels_bfloat16: KernelSet) -> None:
    """4 bits a weight and 16 a group; a plain part beside them in the activations' type."""
    before = kernels_bfloat16.weight_bytes()
    four = formats.quantize(normal(8, 256), "INT4_G128")
    kernels_bfloat16.pack_linear([four, host_weight("F32", 4, 256)[0]], normal(12))
    bias_bytes = 8 * 4 + 4 * 2
    assert kernels_bfloat16.weight_bytes() - before == 8 * (128 + 2 * 2) + 4 * 256 * 2 + bias_bytes


def test_a_format_without_codes_of_its_own_takes_the_compute_type(kernels_float32: KernelSet) -> None:
    check_linear(kernels_float32, ["Q4_K"], num_tokens=2, with_bias=False, wide_out=False)


def test_parts_of_equal_format_are_one_launch(kernels_float32: KernelSet) -> None:
    parts = [host_weight("Q4_1", rows, 64, seed=rows)[0] for rows in (6, 2, 2)]
    assert len(kernels_float32.pack_linear(parts).parts) == 1
    assert torch.device(DEVICE).type == kernels_float32.pack_linear(parts).parts[0].weight.codes.device.type
