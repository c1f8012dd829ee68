"""GGUF files: header, metadata and raw tensor views, read straight from the memory map.

    file = GGUFFile.open(path)
    file.get("general.alignment", int, 32)
    file.strings("tokenizer.ggml.tokens")
    for tensor in file.tensors.values():
        gguf.quants.dequantize(tensor.data(), tensor.ggml_type)

Opening walks the header once (a string array of 50,000 entries costs some 10 ms) and touches no tensor data.
The layout is that of the GGUF specification, versions 2 and 3, little-endian. The constants and the
quantised types are those of the `gguf` package; its own reader makes several numpy arrays for each string,
which is a hundred times slower.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.errors import ModelError

GGUFValue = bool | int | float | str | list[str] | npt.NDArray[Any]
_Kind = TypeVar("_Kind", bound=bool | int | float | str)

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_OUTLINE_KEY: Final = "octavo.outline"  # of a file that holds few of its tensors' data: see outline()
_ABSENT: Final = 1 << 62  # such a tensor's offset
_MAX_ARRAY_ITEMS: Final = 1 << 24
_MAX_DIMENSIONS: Final = 4
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_FIRST_PAIR: Final = 24  # bytes before it: magic, version, the numbers of tensors and of pairs
_SCALARS: Final[Mapping[GGUFValueType, np.dtype[Any]]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
_PLAIN_TENSORS: Final[Mapping[GGMLQuantizationType, np.dtype[Any]]] = {
    GGMLQuantizationType.F64: np.dtype("<f8"),
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.I8: np.dtype("<i1"),
    GGMLQuantizationType.I16: np.dtype("<i2"),
    GGMLQuantizationType.I32: np.dtype("<i4"),
    GGMLQuantizationType.I64: np.dtype("<i8"),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's place in the file."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first, as in numpy: a linear weight is (out, in)
    ggml_type: GGMLQuantizationType
    offset_bytes: int  # from the start of the file
    size_bytes: int
    _buffer: mmap.mmap = field(repr=False, compare=False)

    @property
    def present(self) -> bool:
        """False for a tensor that an outline names only."""
        return self.offset_bytes < _ABSENT

    def data(self) -> npt.NDArray[Any]:
        """A read-only view of the tensor in the mapped file.

        F32, F16, F64 and integer types come typed, in `shape`; every other type (BF16 too) as uint8 with the
        last dimension in bytes, which is what `gguf.quants.dequantize` takes. Not for one that is not `present`.
        """
        dtype = _PLAIN_TENSORS.get(self.ggml_type)
        if dtype is not None:
            flat = np.frombuffer(self._buffer, dtype, prod(self.shape), self.offset_bytes)
            return flat.reshape(self.shape)
        block_items, block_bytes = GGML_QUANT_SIZES[self.ggml_type]
        raw = np.frombuffer(self._buffer, np.uint8, self.size_bytes, self.offset_bytes)
        return raw.reshape(*self.shape[:-1], self.shape[-1] // block_items * block_bytes)


class GGUFMetadata(Mapping[str, GGUFValue]):
    """Key-value pairs of the header, in file order.

    Scalars are Python values, number arrays numpy views, string arrays lists, decoded at the first access.
    """

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._path = path
        self._buffer = buffer
        self._values: dict[str, GGUFValue | None] = {}  # None: a string array not yet decoded
        self._string_arrays: dict[str, tuple[int, int]] = {}  # key -> (offset, count)
        self._end = _FIRST_PAIR

    def __getitem__(self, key: str) -> GGUFValue:
        value = self._values[key]
        if value is None:
            value = self._values[key] = self._decode_strings(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def add(self, key: str, value: GGUFValue) -> None:
        """Called by the header's reader alone."""
        self._values[key] = value

    def add_strings(self, key: str, offset: int, count: int) -> None:
        """Called by the header's reader alone; the strings from `offset` on lie within the file."""
        self._values[key] = None
        self._string_arrays[key] = (offset, count)

    def end_at(self, offset: int) -> None:
        """Called by the header's reader alone: where the last pair ends."""
        self._end = offset

    def encoded(self) -> bytes:
        """All pairs as the file has them."""
        return self._buffer[_FIRST_PAIR : self._end]

    def _decode_strings(self, key: str) -> list[str]:
        offset, count = self._string_arrays[key]
        buffer, unpack = self._buffer, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                start = offset + 8
                offset = start + unpack(buffer, offset)[0]
                strings.append(buffer[start:offset].decode())
        except UnicodeDecodeError:
            raise ModelError(f"{self._path}: entry {len(strings)} of {key} is not UTF-8") from None
        return strings


class GGUFFile:
    """A GGUF file, open for reading. Views of its tensors keep the mapping alive: nothing is to be closed."""

    def __init__(self, path: Path, metadata: GGUFMetadata, tensors: dict[str, GGUFTensor]) -> None:
        self.path: Final = path
        self.metadata: Final = metadata
        self.tensors: Final[Mapping[str, GGUFTensor]] = tensors

    @classmethod
    def open(cls, path: str | PathLike[str]) -> GGUFFile:
        """Raises ModelError naming the file and what is wrong with it; tensors that reach past the end of the
        file are found here."""
        return _HeaderReader(Path(path)).read()

    @property
    def is_outline(self) -> bool:
        """Made by outline(): all tensors are named, of all parts of the model, few have data."""
        return _OUTLINE_KEY in self.metadata

    def get(self, key: str, kind: type[_Kind], default: _Kind) -> _Kind:
        """A scalar, or `default` where the key is absent. Integers count as floats, bools not as integers."""
        return self.require(key, kind) if key in self.metadata else default

    def require(self, key: str, kind: type[_Kind]) -> _Kind:
        """A scalar. Raises ModelError if the key is absent or of another kind."""
        value = self._value(key)
        if kind is float and type(value) is int:
            return cast(_Kind, float(value))
        if type(value) is not kind:
            raise ModelError(f"{self.path}: {key} should be of type {kind.__name__}, not {type(value).__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        """A string array. Raises ModelError if the key is absent or no array of strings."""
        value = self._value(key)
        if isinstance(value, np.ndarray) and value.size == 0:
            return []
        if not isinstance(value, list):
            raise ModelError(f"{self.path}: {key} should be an array of strings")
        return value

    def numbers(self, key: str) -> npt.NDArray[Any]:
        """A number array [n], a read-only view. Raises ModelError if the key is absent or no such array."""
        value = self._value(key)
        if not isinstance(value, np.ndarray):
            raise ModelError(f"{self.path}: {key} should be an array of numbers")
        return value

    def _value(self, key: str) -> GGUFValue:
        try:
            return self.metadata[key]
        except KeyError:
            raise ModelError(f"{self.path}: the metadata key {key} is missing") from None


def outline(file: GGUFFile, keep: Callable[[GGUFTensor], bool]) -> bytes:
    """The file without the data of its tensors, but for those to keep: a GGUF file that GGUFFile.open reads."""
    key = _OUTLINE_KEY.encode()
    pair = _U64.pack(len(key)) + key + _U32.pack(GGUFValueType.BOOL) + b"\1"
    counts = _U64.pack(len(file.tensors)) + _U64.pack(len(file.metadata) + 1)
    infos, data = [], b""
    for tensor in file.tensors.values():
        name, offset = tensor.name.encode(), _ABSENT
        if keep(tensor):
            offset = len(data)
            data += tensor.data().tobytes()
            data += bytes(-len(data) % _DEFAULT_ALIGNMENT)
        sizes = b"".join(map(_U64.pack, reversed(tensor.shape)))
        infos.append(_U64.pack(len(name)) + name + _U32.pack(len(tensor.shape)) + sizes)
        infos.append(_U32.pack(tensor.ggml_type) + _U64.pack(offset))
    header = _MAGIC + _U32.pack(_VERSIONS[-1]) + counts + file.metadata.encoded() + pair + b"".join(infos)
    alignment = file.get("general.alignment", int, _DEFAULT_ALIGNMENT)
    return header + bytes(-len(header) % alignment) + data


class _HeaderReader:
    """Walks the header once; every length is checked against the end of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        try:
            with path.open("rb") as file:
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file") from None
        except ValueError:
            raise ModelError(f"{path}: the file is empty") from None
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from error
        self.metadata = GGUFMetadata(path, self.buffer)

    def read(self) -> GGUFFile:
        try:
            return self._read()
        except (struct.error, OverflowError):
            raise self._error("the file ends within its header: truncated or corrupt") from None
        except UnicodeDecodeError:
            raise self._error("a string of the header is not UTF-8") from None

    def _error(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: {reason}")

    def _read(self) -> GGUFFile:
        if self.buffer[:4] != _MAGIC:
            raise self._error("not a GGUF file (its first four bytes are not 'GGUF')")
        self.offset = 4
        version = self._u32()
        if version not in _VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            what = "a big-endian GGUF file" if big_endian else f"GGUF version {version}"
            raise self._error(f"{what} cannot be read (known: version 2 and 3, little-endian)")
        num_tensors, num_pairs = self._u64(), self._u64()
        for _ in range(num_pairs):
            self._read_pair()
        self.metadata.end_at(self.offset)
        entries = [self._read_tensor_info() for _ in range(self._bounded(num_tensors, "tensors"))]
        start = -(-self.offset // self._alignment()) * self._alignment()
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise self._error(f"tensor {name} appears twice")
            tensors[name] = self._tensor(name, shape, type_id, start + offset)
        return GGUFFile(self.path, self.metadata, tensors)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment}, which is no power of two")
        return alignment

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self.buffer, self.offset)[0]
        self.offset += 4
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack_from(self.buffer, self.offset)[0]
        self.offset += 8
        return value

    def _bounded(self, count: int, what: str) -> int:
        if count > _MAX_ARRAY_ITEMS:
            raise self._error(f"{count} {what}: more than any model has; the header is corrupt")
        return count

    def _string(self) -> str:
        size = self._u64()
        end = self.offset + size
        if end > len(self.buffer):
            raise OverflowError
        value = self.buffer[self.offset : end].decode()
        self.offset = end
        return value

    def _read_pair(self) -> None:
        key = self._string()
        if key in self.metadata:
            raise self._error(f"the metadata key {key} appears twice")
        kind = self._kind(key)
        if kind is GGUFValueType.STRING:
            self.metadata.add(key, self._string())
        elif kind is GGUFValueType.ARRAY:
            self._read_array(key)
        else:
            self.metadata.add(key, self._numbers(kind, 1)[0].item())

    def _kind(self, key: str) -> GGUFValueType:
        kind = self._u32()
        try:
            return GGUFValueType(kind)
        except ValueError:
            raise self._error(f"the metadata key {key} has the unknown value type {kind}") from None

    def _read_array(self, key: str) -> None:
        kind = self._kind(key)
        count = self._bounded(self._u64(), f"entries in {key}")
        if kind is GGUFValueType.ARRAY:
            raise self._error(f"the metadata key {key} is an array of arrays, which cannot be read")
        if kind is not GGUFValueType.STRING:
            self.metadata.add(key, self._numbers(kind, count))
            return
        start = offset = self.offset
        buffer, unpack = self.buffer, _U64.unpack_from
        for _ in range(count):
            offset += 8 + unpack(buffer, offset)[0]
        if offset > len(buffer):
            raise OverflowError
        self.offset = offset
        self.metadata.add_strings(key, start, count)

    def _numbers(self, kind: GGUFValueType, count: int) -> npt.NDArray[Any]:
        dtype = _SCALARS[kind]
        end = self.offset + count * dtype.itemsize
        if end > len(self.buffer):
            raise OverflowError
        if count == 0:  # numpy refuses a view at the very end of a buffer
            return np.empty(0, dtype)
        values = np.frombuffer(self.buffer, dtype, count, self.offset)
        self.offset = end
        return values

    def _read_tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._u32()
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._u64() for _ in range(num_dimensions))[::-1]
        return name, shape, self._u32(), self._u64()

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
        try:
            ggml_type = GGMLQuantizationType(type_id)
            block_items, block_bytes = GGML_QUANT_SIZES[ggml_type]
        except (ValueError, KeyError):
            raise self._error(f"tensor {name} has the unknown type {type_id}") from None
        if shape[-1] % block_items or min(shape) < 1:
            raise self._error(f"tensor {name} of type {ggml_type.name} has the impossible shape {shape}")
        size = prod(shape) // block_items * block_bytes
        absent = offset >= _ABSENT and _OUTLINE_KEY in self.metadata
        if offset + size > len(self.buffer) and not absent:
            missing = offset + size - len(self.buffer)
            raise self._error(f"tensor {name} reaches {missing} bytes past the end of the file: truncated or corrupt")
        return GGUFTensor(name, shape, ggml_type, offset, size, self.buffer)
