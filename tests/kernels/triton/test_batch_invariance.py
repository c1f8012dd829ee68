"""With batch_invariant a row is computed alike, bit for bit, alone and among any number of others."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import formats
from kernels.interface import DType, HostWeight, KernelSet
from kernels.triton.triton_kernels import TritonKernels
from tests.kernels.cases import assert_close, host_weight, normal, put
from tests.kernels.triton.conftest import DEVICE


@pytest.fixture(scope="module", params=[DType.FLOAT32, DType.BFLOAT16], ids=str)
def invariant(request: pytest.FixtureRequest) -> KernelSet:
    return TritonKernels(DEVICE, request.param, 1, batch_invariant=True)


WEIGHTS = ("F32", "Q4_1", "INT4_G128", "INT8")


def weight_of(format: str, rows: int, columns: int) -> HostWeight:
    if format.startswith("INT"):
        return formats.quantize(normal(rows, columns, scale=0.1), format)
    return host_weight(format, rows, columns)[0]


@pytest.mark.parametrize("format", WEIGHTS)
@pytest.mark.parametrize("wide_out", [False, True])
def test_a_products_row_alone_and_among_others(invariant: KernelSet, format: str, wide_out: bool) -> None:
    """K is split, outputs end within a tile, the row changes its place; and the product is right."""
    columns, rows, place = 2048, 70, 66
    host = weight_of(format, rows, columns)
    weight = invariant.pack_linear([host], normal(rows, seed=5))
    dtype = DType.FLOAT32 if wide_out else invariant.activation_dtype
    x, held = put(invariant, normal(67, columns))
    together, alone = invariant.empty((67, rows), dtype), invariant.empty((1, rows), dtype)
    invariant.linear(x, weight, together)
    invariant.linear(x[place : place + 1], weight, alone)
    np.testing.assert_array_equal(invariant.download(alone)[0], invariant.download(together)[place])
    expected = held.astype(np.float64) @ formats.dequantize(host).astype(np.float64).T + normal(rows, seed=5)
    assert_close(invariant, together, expected)


def test_an_experts_row_alone_and_among_others(invariant: KernelSet) -> None:
    num_tokens, columns = 40, 200
    weight = invariant.pack_experts([[host_weight("F32", 66, columns, seed=expert)[0]] for expert in range(3)])
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(3, dtype=np.int32), (num_tokens, 1)), axis=1)[:, :2]
    ids = np.ascontiguousarray(ids)
    x, _ = put(invariant, normal(num_tokens, columns))
    together = invariant.empty((num_tokens, 2, 66), invariant.activation_dtype)
    alone = invariant.empty((1, 2, 66), invariant.activation_dtype)
    invariant.grouped_linear(x, weight, invariant.upload(ids), together)
    invariant.grouped_linear(x[23:24], weight, invariant.upload(ids[23:24]), alone)
    np.testing.assert_array_equal(invariant.download(alone)[0], invariant.download(together)[23])
