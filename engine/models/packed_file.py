"""A file of packed weights: written while they are packed, mapped into memory on later starts.

    records        bytes, each beginning on a page
    index          JSON: {"format", "kernels", "records": [[description, offset, size, crc32], …]}
    last 24 bytes  index offset (u64), index size (u64), crc32 of the index (u32), b"OPW1"

The records stand in the order in which engine.models.weights.WeightPacker packs: the names of tensors play no part.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from engine.models.architecture import WeightNames
from engine.models.checkpoint import Progress
from kernels.interface import Array, HostWeight, KernelSet, StoredWeight

_END: Final = struct.Struct("<QQI4s")
_MAGIC: Final = b"OPW1"
_PAGE: Final = 4096
_VECTOR: Final = "vector"  # the description of a vector's record
_Record = tuple[Any, int, int, int]


class PackedFileError(Exception):
    """The file is not what was written, or not of this model; the message says what is wrong with it."""


class RecordingPacker:
    """Packs as the kernels do, and writes down what came of it; see weights.Packer."""

    def __init__(self, kernels: KernelSet, file: BinaryIO) -> None:
        self._kernels = kernels
        self._file = file
        self._records: list[_Record] = []

    def pack_linear(self, parts: Sequence[HostWeight], bias: npt.NDArray[np.float32] | None = None) -> Array:
        return self._keep(self._kernels.pack_linear(parts, bias), bias is not None)

    def pack_experts(self, experts: Sequence[Sequence[HostWeight]]) -> Array:
        return self._keep(self._kernels.pack_experts(experts), False)

    def pack_vector(self, host: npt.NDArray[np.float32]) -> Array:
        self._write(_VECTOR, np.ascontiguousarray(host, np.float32).view(np.uint8))
        return self._kernels.pack_vector(host)

    def finish(self) -> None:
        """Write the index."""
        index = json.dumps({"format": 1, "kernels": self._kernels.packed_format, "records": self._records}).encode()
        offset = self._file.tell()
        self._file.write(index + _END.pack(offset, len(index), zlib.crc32(index), _MAGIC))

    def _keep(self, weight: Array, has_bias: bool) -> Array:
        for stored in self._kernels.export_weight(weight):
            self._write([stored.description, has_bias], stored.data)
        return weight

    def _write(self, description: Any, data: npt.NDArray[np.uint8]) -> None:
        self._file.write(bytes(-self._file.tell() % _PAGE))
        self._records.append((description, self._file.tell(), data.nbytes, zlib.crc32(data.data)))
        self._file.write(data.data)


class PackedFile:
    """A file mapped for reading; arrays of it keep the mapping alive. Processes that map it share its pages."""

    def __init__(self, path: Path, packed_format: str | None) -> None:
        """Reads the index. Raises PackedFileError; OSError where there is no such file."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _END.size:
                raise PackedFileError("it is truncated")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.num_bytes: Final = size
        index = self._read_index()
        if index.get("kernels") != packed_format:
            raise PackedFileError(f"it was packed for {index.get('kernels')}")
        self._records: list[_Record] = [(record[0], *map(int, record[1:4])) for record in index["records"]]
        if any(offset + length > size for _, offset, length, _ in self._records):
            raise PackedFileError("it is truncated")

    def check(self, num_threads: int, progress: Progress | None) -> None:
        """Compare every record with its checksum; brings the file into memory. Raises PackedFileError."""
        done, total = 0, sum(length for _, _, length, _ in self._records)
        with ThreadPoolExecutor(num_threads) as pool:
            for record, sum_now in zip(self._records, pool.map(self._checksum, self._records), strict=True):
                if sum_now != record[3]:
                    raise PackedFileError("it is damaged: a checksum differs")
                done += record[2]
                if progress is not None:
                    progress(done, total)

    def stored(self) -> Iterable[StoredWeight]:
        """The records in order."""
        return (StoredWeight(description, self._bytes(offset, size)) for description, offset, size, _ in self._records)

    def _bytes(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._map, np.uint8, size, offset) if size else np.empty(0, np.uint8)

    def _checksum(self, record: _Record) -> int:
        return zlib.crc32(self._bytes(record[1], record[2]).data)

    def _read_index(self) -> dict[str, Any]:
        offset, size, crc, magic = _END.unpack_from(self._map, len(self._map) - _END.size)
        if magic != _MAGIC or offset + size + _END.size != len(self._map):
            raise PackedFileError("it is truncated")
        text = self._map[offset : offset + size]
        if zlib.crc32(text) != crc:
            raise PackedFileError("it is damaged: the index's checksum differs")
        index: dict[str, Any] = json.loads(text)
        return index


class ReplayingPacker:
    """Gives the weights of a file in the order in which they were packed; see weights.Packer."""

    def __init__(self, kernels: KernelSet, file: PackedFile) -> None:
        self._kernels = kernels
        self._stored = iter(file.stored())

    def pack_linear(self, parts: Sequence[HostWeight], bias: npt.NDArray[np.float32] | None = None) -> Array:
        return self._attach([parts], bias is not None, self._kernels.attach_weight)

    def pack_experts(self, experts: Sequence[Sequence[HostWeight]]) -> Array:
        return self._attach(experts, False, self._kernels.attach_experts)

    def pack_vector(self, host: npt.NDArray[np.float32]) -> Array:
        stored = self._next()
        if stored.description != _VECTOR or stored.data.nbytes != host.nbytes:
            raise PackedFileError("it holds other weights than this model has")
        return self._kernels.pack_vector(stored.data.view(np.float32).reshape(host.shape))

    def finish(self) -> None:
        """Raises PackedFileError if something is left over."""
        if next(self._stored, None) is not None:
            raise PackedFileError("it holds more weights than this model has")

    def _next(self) -> StoredWeight:
        stored = next(self._stored, None)
        if stored is None:
            raise PackedFileError("it holds fewer weights than this model has")
        return stored

    def _piece(self, has_bias: bool) -> StoredWeight:
        stored = self._next()
        description, had_bias = stored.description
        if had_bias != has_bias:
            raise ValueError("one has a bias, the other none")
        return StoredWeight(description, stored.data)

    def _attach(
        self,
        weights: Sequence[Sequence[HostWeight]],
        has_bias: bool,
        attach: Callable[[Sequence[StoredWeight], tuple[int, int]], Array],
    ) -> Array:
        shape = (sum(part.rows for part in weights[0]), weights[0][0].columns)
        try:
            return attach([self._piece(has_bias) for _ in weights], shape)
        except (ValueError, TypeError, KeyError) as error:
            raise PackedFileError(f"it holds other weights than this model has: {error}") from error


class ShapesOnly:
    """Weights without contents, for a ReplayingPacker; see checkpoint.Weights."""

    def __init__(self, names: WeightNames) -> None:
        self._names = names

    def has(self, name: str) -> bool:
        return name in self._names.stems

    def matrix(self, name: str, rows: int, columns: int, layer: int = 0, heads: int = 0) -> HostWeight:
        return HostWeight("", np.empty(0, np.uint8), rows, columns)

    def experts(self, name: str, count: int, rows: int, columns: int, layer: int) -> list[HostWeight]:
        return [self.matrix(name, rows, columns)] * count

    def vector(self, name: str, size: int, layer: int = 0) -> npt.NDArray[np.float32]:
        return np.empty(size, np.float32)

    def bias(self, name: str, size: int, layer: int = 0, heads: int = 0) -> npt.NDArray[np.float32]:
        return np.empty(size, np.float32)

    def finish(self) -> None:
        """Nothing can be left over here; the packer knows."""
