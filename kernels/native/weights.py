"""From a file's weights to the kernels' layout."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import formats
from kernels.interface import HostWeight
from kernels.native import _native

_OWN_BITS = ("Q8_0", "Q4_0", "Q4_1", "INT8", *formats.INT4_GROUPS)
_DEQUANTIZED_AT_ONCE = 1 << 22  # elements: bounds the work memory of a large matrix


class WeightForm(Enum):
    """What weights are kept in. OWN_BITS: formats with kernels of their own keep their codes, others are bfloat16."""

    FLOAT32 = "float32"
    OWN_BITS = "own bits"


def pack(parts: Sequence[HostWeight], bias: npt.NDArray[np.float32] | None, form: WeightForm) -> _native.PackedWeight:
    """The parts stacked along the outputs."""
    return _native.pack([_piece(part, form) for part in parts], form is not WeightForm.FLOAT32, bias)


def _piece(part: HostWeight, form: WeightForm) -> tuple[str, npt.NDArray[np.uint8], int, int]:
    keeps_codes = part.format in _OWN_BITS and form is WeightForm.OWN_BITS
    if keeps_codes or part.format in formats.PLAIN:
        return part.format, _bytes(part.data), part.rows, part.columns
    return "F32", _bytes(_dequantize(part)), part.rows, part.columns


def _dequantize(part: HostWeight) -> npt.NDArray[np.float32]:
    result = np.empty((part.rows, part.columns), np.float32)
    rows_at_once = max(1, _DEQUANTIZED_AT_ONCE // part.columns)
    for first in range(0, part.rows, rows_at_once):
        result[first : first + rows_at_once] = formats.dequantize(part, first, first + rows_at_once)
    return result


def _bytes(data: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Rows of bytes, without a copy when they are contiguous."""
    return np.ascontiguousarray(data).view(np.uint8)
