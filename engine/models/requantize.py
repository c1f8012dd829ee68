"""Weights in other bits than their files hold: what `--quantization` asks for, tensor by tensor.

    none    all in the compute type: a GGUF's codes are dequantised
    int8    a scale per output (row): absmax / 127
    int4    a scale per `group` inputs: absmax / 7, codes in [−8, 7]; embedding and head in int8, since their errors
            reach the logits unsoftened

Routers of experts stay as they are: they are small, and a wrong choice of expert costs more than their bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from engine.models.checkpoint import Weights
from engine.models.quantization import Quantization
from kernels import formats
from kernels.interface import DType, HostWeight

_TABLES: Final = ("embedding", "positions", "head")
_UNTOUCHED: Final = ("router", "shared_router")
_ELEMENTS_AT_ONCE: Final = 1 << 22  # bounds the float32 copy that a large matrix needs


def requantized(weights: Weights, quantization: Quantization, group: int, dtype: DType) -> Weights:
    """The same weights in the bits asked for; "auto" gives them back as they are. `dtype` is the compute type."""
    return weights if quantization == "auto" else _Requantized(weights, quantization, group, dtype)


def label(quantization: Quantization, group: int, file_format: str, dtype: str) -> str:
    """What the weights are kept in, for people and metrics; `file_format` is what the file mostly holds."""
    return {"auto": file_format, "none": dtype, "int8": "int8", "int4": f"int4-g{group}"}[quantization]


class _Requantized:
    """See checkpoint.Weights."""

    def __init__(self, weights: Weights, quantization: Quantization, group: int, dtype: DType) -> None:
        self._weights = weights
        self._table_format = "INT8"
        self._format = "INT8" if quantization == "int8" else f"INT4_G{group}"
        if quantization == "none":
            self._format = self._table_format = "F32" if dtype is DType.FLOAT32 else "BF16"

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def matrix(self, name: str, rows: int, columns: int, layer: int = 0, heads: int = 0) -> HostWeight:
        return self._convert(name, self._weights.matrix(name, rows, columns, layer, heads))

    def experts(self, name: str, count: int, rows: int, columns: int, layer: int) -> list[HostWeight]:
        return [self._convert(name, one) for one in self._weights.experts(name, count, rows, columns, layer)]

    def vector(self, name: str, size: int, layer: int = 0) -> npt.NDArray[np.float32]:
        return self._weights.vector(name, size, layer)

    def bias(self, name: str, size: int, layer: int = 0, heads: int = 0) -> npt.NDArray[np.float32]:
        return self._weights.bias(name, size, layer, heads)

    def finish(self) -> None:
        self._weights.finish()

    def _convert(self, name: str, weight: HostWeight) -> HostWeight:
        target = self._table_format if name in _TABLES else self._format
        if name in _UNTOUCHED or weight.format == target:
            return weight
        if target in formats.PLAIN:
            dtype: np.dtype[Any] = np.dtype(np.float32 if target == "F32" else ml_dtypes.bfloat16)
            pieces = [values.astype(dtype) for values in _values(weight)]
        else:
            pieces = [formats.quantize(values, target).data for values in _values(weight)]
        return HostWeight(target, np.concatenate(pieces), weight.rows, weight.columns)


def _values(weight: HostWeight) -> Iterator[npt.NDArray[np.float32]]:
    """The weight in float32, some rows at a time."""
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // weight.columns)
    for first in range(0, weight.rows, rows_at_once):
        yield formats.dequantize(weight, first, min(weight.rows, first + rows_at_once))
