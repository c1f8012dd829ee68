"""Weights as files and tools hold them: from any format to float32, and from floats to ours. numpy only."""

from __future__ import annotations

from typing import Any

import gguf.quants
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from kernels.interface import HostWeight

PLAIN = ("F32", "F16", "BF16")
INT4_GROUPS = {"INT4_G32": 32, "INT4_G64": 64, "INT4_G128": 128}
_SCALE_BYTES = 2  # float16


def row_bytes(name: str, columns: int) -> int:
    """Bytes of a row in one of our own formats ("INT8", "INT4_G…")."""
    if name == "INT8":
        return _SCALE_BYTES + columns
    return -(-columns // INT4_GROUPS[name]) * (_SCALE_BYTES + INT4_GROUPS[name] // 2)


def dequantize(part: HostWeight, first: int = 0, last: int | None = None) -> npt.NDArray[np.float32]:
    """Rows [first, last) as float32 [rows, columns]."""
    rows = part.data[first:last]
    if part.format in PLAIN:
        return rows.astype(np.float32)
    if part.format == "INT8":
        scales = _scales(rows[:, None])
        return scales[:, 0] * rows[:, _SCALE_BYTES:].view(np.int8)
    if part.format in INT4_GROUPS:
        groups = rows.reshape(len(rows), -1, _SCALE_BYTES + INT4_GROUPS[part.format] // 2)
        nibbles = groups[..., _SCALE_BYTES:]
        codes = np.stack((nibbles & 15, nibbles >> 4), axis=-1).reshape(*groups.shape[:2], -1)
        signed = (codes ^ 8).astype(np.float32) - 8
        return (_scales(groups) * signed).reshape(len(rows), -1)[:, : part.columns]
    dequantized: npt.NDArray[np.float32] = gguf.quants.dequantize(rows, GGMLQuantizationType[part.format])
    return dequantized


def quantize(weight: npt.NDArray[np.float32], name: str) -> HostWeight:
    """Round to nearest in "INT8" (scale absmax/127 per row) or "INT4_G…" (absmax/7 per group, codes in [−8, 7]; a row's
    last group is filled up with zeros)."""
    rows, columns = weight.shape
    if name == "INT8":
        scales, codes = _round(weight[:, None], 127, -127, 127)
        data = np.concatenate((scales.view(np.uint8)[:, 0], codes[:, 0].view(np.uint8)), axis=1)
        return HostWeight(name, np.ascontiguousarray(data), rows, columns)
    group = INT4_GROUPS[name]
    whole = np.pad(weight, ((0, 0), (0, -columns % group)))
    scales, codes = _round(whole.reshape(rows, -1, group), 7, -8, 7)
    nibbles = codes.astype(np.uint8) & 15
    packed = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    data = np.concatenate((scales.view(np.uint8), packed), axis=-1).reshape(rows, -1)
    return HostWeight(name, np.ascontiguousarray(data), rows, columns)


def _round(
    groups: npt.NDArray[np.float32], top: int, low: int, high: int
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int8]]:
    """Scales [..., 1] and codes of groups along the last axis; codes are taken against the scale as it is stored."""
    scales = (np.abs(groups).max(axis=-1, keepdims=True) / top).astype(np.float16)
    divisors = np.where(scales == 0, 1, scales.astype(np.float32))
    return scales, np.clip(np.rint(groups / divisors), low, high).astype(np.int8)


def _scales(groups: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The float16 at the start of each group, as float32 [..., 1]."""
    return np.ascontiguousarray(groups[..., :_SCALE_BYTES]).view(np.float16).astype(np.float32)
