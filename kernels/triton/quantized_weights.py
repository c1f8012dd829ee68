"""Quantised weights in the layout of kernels/triton/quantized_linear.py. Codes are kept as the file has them.

A *group* is as many consecutive inputs as one dot of the kernel takes: those that share a scale, or _CHANNEL_GROUP
where one scale serves a whole row. A byte of 4-bit codes holds input i of group 2p in its low half and input i of group
2p + 1 in its high half, so that both halves meet consecutive activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.formats import INT4_GROUPS
from kernels.interface import HostWeight
from kernels.reference.arrays import from_host

_GGUF_GROUP = 32
_CHANNEL_GROUP = 64
_ROWS_AT_ONCE = 4096  # bounds the work space of packing

Codes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """What the kernel is compiled for."""

    bits: int  # 4: codes 0 … 15, a weight is scale · (code − 8), or scale · code + minimum; 8: scale · code
    group: int
    has_minimum: bool = False
    per_channel: bool = False  # one scale for a row


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """[N, K] in groups; K is filled up to whole bytes of groups with weights of 0."""

    format: QuantizedFormat
    codes: torch.Tensor  # uint8 [pairs of groups, N, group], or int8 [groups, N, group]
    scales: torch.Tensor  # float16 [groups, N], or [1, N]
    minima: torch.Tensor | None  # float16 [groups, N]
    num_inputs: int

    @property
    def num_outputs(self) -> int:
        return self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.minima is None else self.minima.nbytes)


FORMATS = {
    "Q4_0": QuantizedFormat(4, _GGUF_GROUP),
    "Q4_1": QuantizedFormat(4, _GGUF_GROUP, has_minimum=True),
    "Q8_0": QuantizedFormat(8, _GGUF_GROUP),
    "INT8": QuantizedFormat(8, _CHANNEL_GROUP, per_channel=True),
    **{name: QuantizedFormat(4, group) for name, group in INT4_GROUPS.items()},
}


def pack(parts: Sequence[HostWeight], device: torch.device) -> QuantizedWeight:
    """The parts, of formats in FORMATS that are kept alike, stacked along the outputs."""
    kind, columns = FORMATS[parts[0].format], parts[0].columns
    num_outputs = sum(part.rows for part in parts)
    num_groups = -(-columns // kind.group)
    if kind.bits == 4:
        num_groups += num_groups % 2
    codes = np.zeros((num_groups * kind.bits // 8, num_outputs, kind.group), np.uint8)
    scales = np.zeros((1 if kind.per_channel else num_groups, num_outputs), np.float16)
    minima = np.zeros_like(scales) if kind.has_minimum else None
    start = 0
    for part in parts:
        for first in range(0, part.rows, _ROWS_AT_ONCE):
            rows = part.data[first : first + _ROWS_AT_ONCE]
            here = slice(start + first, start + first + len(rows))
            part_codes, part_scales, part_minima = _unpack(part.format, rows, columns)
            codes[:, here] = _joined(part_codes, num_groups, kind)
            scales[: part_scales.shape[1], here] = part_scales.T
            if minima is not None and part_minima is not None:
                minima[: part_minima.shape[1], here] = part_minima.T
        start += part.rows
    return QuantizedWeight(
        kind,
        from_host(codes if kind.bits == 4 else codes.view(np.int8)).to(device),
        from_host(scales).to(device),
        None if minima is None else from_host(minima).to(device),
        columns,
    )


def _joined(codes: Codes, num_groups: int, kind: QuantizedFormat) -> Codes:
    """Codes [rows, groups, group] as they lie in memory: [groups or pairs of them, rows, group]."""
    by_group = codes.transpose(1, 0, 2)
    if kind.bits == 8:
        return by_group
    if len(by_group) < num_groups:  # the scale of the missing one is 0
        by_group = np.concatenate((by_group, np.zeros_like(by_group[:1])))
    return np.asarray(by_group[0::2] | by_group[1::2] << 4, np.uint8)


def _unpack(
    format: str, rows: Codes, columns: int
) -> tuple[Codes, npt.NDArray[np.float16], npt.NDArray[np.float16] | None]:
    """Codes as bytes [rows, groups, group], scales and minima [rows, groups] of rows as a file holds them."""
    if format == "INT8":
        codes = np.zeros((len(rows), -(-columns // _CHANNEL_GROUP) * _CHANNEL_GROUP), np.uint8)
        codes[:, :columns] = rows[:, 2:]
        return codes.reshape(len(rows), -1, _CHANNEL_GROUP), _half(rows[:, None, :2]), None
    kind = FORMATS[format]
    blocks = rows.reshape(len(rows), -(-columns // kind.group), -1)
    scales = _half(blocks[..., :2])
    if kind.bits == 8:
        return blocks[..., 2:], scales, None
    if format in INT4_GROUPS:
        both = blocks[..., 2:]
        codes = np.stack((both & 15, both >> 4), axis=-1).reshape(*both.shape[:2], kind.group)
        return np.asarray(codes ^ 8, np.uint8), scales, None  # two's complement to 0 … 15
    both = blocks[..., 4 if kind.has_minimum else 2 :]
    codes = np.concatenate((both & 15, both >> 4), axis=-1)
    return codes, scales, _half(blocks[..., 2:4]) if kind.has_minimum else None


def _half(data: npt.NDArray[Any]) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(data).view(np.float16)[..., 0]
