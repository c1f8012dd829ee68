"""Weights in other bits than their files': which tensors, which codes."""

from __future__ import annotations

import numpy as np
import pytest

from engine.models.checkpoint import DummyWeights
from engine.models.quantization import Quantization
from engine.models.requantize import label, requantized
from kernels import formats
from kernels.interface import DType, HostWeight
from tests.kernels.cases import host_weight


class OneWeight(DummyWeights):
    """The same matrix under every name."""

    def __init__(self, weight: HostWeight) -> None:
        super().__init__()
        self.weight = weight

    def matrix(self, name: str, rows: int, columns: int, layer: int = 0, heads: int = 0) -> HostWeight:
        return self.weight


def format_of(quantization: Quantization, name: str, file_format: str = "Q4_1", dtype: DType = DType.BFLOAT16) -> str:
    weights = requantized(OneWeight(host_weight(file_format, 8, 256)[0]), quantization, 64, dtype)
    return weights.matrix(name, 8, 256).format


@pytest.mark.parametrize(
    ("quantization", "layer", "table"),
    [("auto", "Q4_1", "Q4_1"), ("none", "BF16", "BF16"), ("int8", "INT8", "INT8"), ("int4", "INT4_G64", "INT8")],
)
def test_layers_and_tables_get_the_bits_asked_for_and_routers_keep_theirs(
    quantization: Quantization, layer: str, table: str
) -> None:
    assert [format_of(quantization, name) for name in ("q", "down", "expert_up")] == [layer] * 3
    assert [format_of(quantization, name) for name in ("embedding", "head", "positions")] == [table] * 3
    assert [format_of(quantization, name) for name in ("router", "shared_router")] == ["Q4_1"] * 2


def test_none_means_the_compute_type() -> None:
    assert format_of("none", "q", dtype=DType.FLOAT32) == "F32"
    assert format_of("none", "q", "F32", dtype=DType.FLOAT32) == "F32"


def test_a_large_matrix_is_converted_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.requantize._ELEMENTS_AT_ONCE", 3 * 256)
    weight, values = host_weight("Q8_0", 8, 256)
    for quantization, name in (("int8", "INT8"), ("int4", "INT4_G64")):
        got = requantized(OneWeight(weight), quantization, 64, DType.BFLOAT16).matrix("q", 8, 256)  # type: ignore[arg-type]
        np.testing.assert_array_equal(got.data, formats.quantize(values, name).data)


def test_experts_are_converted_one_by_one() -> None:
    weights = requantized(DummyWeights(), "int4", 128, DType.BFLOAT16)
    assert [expert.format for expert in weights.experts("expert_up", 3, 8, 256, 0)] == ["INT4_G128"] * 3


@pytest.mark.parametrize("columns", [1, 64, 100, 129, 576])
def test_the_last_group_of_a_row_may_be_short(columns: int) -> None:
    values = np.random.default_rng(0).standard_normal((5, columns)).astype(np.float32)
    weight = formats.quantize(values, "INT4_G128")
    assert weight.data.shape == (5, formats.row_bytes("INT4_G128", columns))
    restored = formats.dequantize(weight)
    assert restored.shape == values.shape
    for first in range(0, columns, 128):
        group = slice(first, min(columns, first + 128))
        step = np.abs(values[:, group]).max(axis=1, keepdims=True) / 7
        assert (np.abs(restored - values)[:, group] <= 0.51 * step).all()


def test_labels_say_what_the_weights_are_kept_in() -> None:
    kinds: tuple[Quantization, ...] = ("auto", "none", "int8", "int4")
    assert [label(kind, 64, "Q4_1", "bfloat16") for kind in kinds] == ["Q4_1", "bfloat16", "int8", "int4-g64"]
