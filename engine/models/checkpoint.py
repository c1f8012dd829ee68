"""Weights by the decoder's names: the file's names, orders and offsets undone, every shape checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from engine.errors import ModelError
from engine.models.architecture import WeightNames
from engine.models.source import PLAIN_DTYPES, HostTensor, TensorSource
from kernels.interface import HostWeight

Progress = Callable[[int, int], None]  # bytes done, bytes in all

DUMMY_FORMAT: Final = "BF16"
DUMMY_DEVIATION: Final = 0.02


class Weights(Protocol):
    """What the decoder is built from. `name` is one of architecture.WeightNames; sizes are those expected."""

    def has(self, name: str) -> bool:
        """Whether the files hold this weight under its own name (else a fused one does)."""

    def matrix(self, name: str, rows: int, columns: int, layer: int = 0, heads: int = 0) -> HostWeight:
        """A linear weight or a table. `heads`: its rows are heads that RoPE turns."""

    def experts(self, name: str, count: int, rows: int, columns: int, layer: int) -> list[HostWeight]:
        """The weight of each expert."""

    def vector(self, name: str, size: int, layer: int = 0) -> npt.NDArray[np.float32]:
        """A norm's weight, offset included."""

    def bias(self, name: str, size: int, layer: int = 0, heads: int = 0) -> npt.NDArray[np.float32]:
        """The bias of a linear or of a norm."""

    def finish(self) -> None:
        """To be called when everything has been read."""


class Checkpoint:
    """Weights from files. Strict: what is missing, left over or of another shape is a ModelError that names file,
    tensor and reason."""

    def __init__(self, source: TensorSource, names: WeightNames, tied_head: bool, progress: Progress | None) -> None:
        self._source = source
        self._names = names
        self._progress = progress
        self._done_bytes = 0
        self._unread = dict.fromkeys(name for name in source.names() if not self._is_ignored(name))
        self._prefix = self._find_prefix()
        if tied_head:
            self._unread.pop(f"{self._stem('head')}.weight", None)  # some files repeat the embedding there

    def has(self, name: str) -> bool:
        return name in self._names.stems

    def matrix(self, name: str, rows: int, columns: int, layer: int = 0, heads: int = 0) -> HostWeight:
        stem = self._stem(name, layer)
        turned = self._names.transposed and "{layer}" in self._names.stems[name]
        tensor = self._read(f"{stem}.weight", (columns, rows) if turned else (rows, columns))
        data = np.ascontiguousarray(tensor.data.T) if turned else tensor.data.reshape(rows, -1)
        return HostWeight(tensor.format, self._order_rows(data, heads), rows, columns)

    def experts(self, name: str, count: int, rows: int, columns: int, layer: int) -> list[HostWeight]:
        if "{expert}" in self._names.stems[name]:
            stems = [self._stem(name, layer, expert) for expert in range(count)]
            tensors = [self._read(f"{stem}.weight", (rows, columns)) for stem in stems]
            return [HostWeight(tensor.format, tensor.data, rows, columns) for tensor in tensors]
        stacked = self._read(f"{self._stem(name, layer)}.weight", (count, rows, columns))
        return [HostWeight(stacked.format, data, rows, columns) for data in stacked.data]

    def vector(self, name: str, size: int, layer: int = 0) -> npt.NDArray[np.float32]:
        return self._floats(f"{self._stem(name, layer)}.weight", size) + np.float32(self._names.norm_offset)

    def bias(self, name: str, size: int, layer: int = 0, heads: int = 0) -> npt.NDArray[np.float32]:
        return self._order_rows(self._floats(f"{self._stem(name, layer)}.bias", size), heads)

    def finish(self) -> None:
        """Raises ModelError naming the tensors that nobody asked for."""
        if not self._unread:
            return
        left = list(self._unread)
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ModelError(
            f"{self._source.where(left[0])}: tensors left over that the model has no place for: "
            f"{', '.join(left[:3])}{more}"
        )

    def _is_ignored(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self._names.ignored)

    def _find_prefix(self) -> str:
        embedding = f"{self._names.stems['embedding']}.weight"
        fitting = (prefix for prefix in self._names.prefixes if embedding.format(prefix=prefix) in self._unread)
        return next(fitting, self._names.prefixes[0])

    def _stem(self, name: str, layer: int = 0, expert: int = 0) -> str:
        return self._names.stems[name].format(prefix=self._prefix, layer=layer, expert=expert)

    def _order_rows(self, data: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
        """Rows of rotated heads in the order of half pairs: (0, 2, 4, …, 1, 3, 5, …) of an interleaved file."""
        if not heads or not self._names.interleaved_rope:
            return data
        halves = data.reshape(heads, -1, 2, *data.shape[1:]).swapaxes(1, 2)
        return halves.reshape(data.shape)

    def _floats(self, name: str, size: int) -> npt.NDArray[np.float32]:
        tensor = self._read(name, (size,))
        if tensor.format not in PLAIN_DTYPES:
            raise ModelError(
                f"{self._source.where(name)}: tensor {name} has the type {tensor.format}, not a float type"
            )
        return tensor.data.astype(np.float32)

    def _read(self, name: str, shape: tuple[int, ...]) -> HostTensor:
        if name not in self._unread:
            raise ModelError(f"{self._source.where(name)}: tensor {name} is missing")
        del self._unread[name]
        tensor = self._source.read(name)
        if _squeezed(tensor.shape) != _squeezed(shape):
            raise ModelError(
                f"{self._source.where(name)}: tensor {name} has the shape {list(tensor.shape)}, expected {list(shape)}"
            )
        self._done_bytes += tensor.data.nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._source.total_bytes)
        return tensor


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A single row may be written as a vector."""
    return shape[1:] if len(shape) == 2 and shape[0] == 1 else shape


class DummyWeights:
    """Seeded random weights: for measuring without a model's files, and for tests."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def has(self, name: str) -> bool:
        return name not in ("qkv", "gate_up", "expert_gate_up")

    def matrix(self, name: str, rows: int, columns: int, layer: int = 0, heads: int = 0) -> HostWeight:
        values = self._random.standard_normal((rows, columns), np.float32) * np.float32(DUMMY_DEVIATION)
        return HostWeight(DUMMY_FORMAT, values.astype(ml_dtypes.bfloat16), rows, columns)

    def experts(self, name: str, count: int, rows: int, columns: int, layer: int) -> list[HostWeight]:
        return [self.matrix(name, rows, columns) for _ in range(count)]

    def vector(self, name: str, size: int, layer: int = 0) -> npt.NDArray[np.float32]:
        return np.ones(size, np.float32)

    def bias(self, name: str, size: int, layer: int = 0, heads: int = 0) -> npt.NDArray[np.float32]:
        return np.zeros(size, np.float32)

    def finish(self) -> None:
        """Nothing can be left over."""
