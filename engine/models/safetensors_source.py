"""Weights from a folder of safetensors files: one, or shards named by an index."""

from __future__ import annotations

import json
import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError
from engine.models.source import PLAIN_DTYPES, HostTensor

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor's place in its shard."""

    shard: Path
    format: str  # as the header names it
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    end: int


class SafetensorsSource:
    """The tensors of a folder; see source.TensorSource. A shard is mapped from its first tensor to its last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, _Entry] = {}
        for shard in _shards(folder):
            for name, entry in _read_header(shard).items():
                if name in self._entries:
                    raise ModelError(f"{shard}: tensor {name} is in {self._entries[name].shard.name} too")
                self._entries[name] = entry
        self._check_index()
        self._unread = Counter(entry.shard for entry in self._entries.values())
        self._mapped: dict[Path, mmap.mmap] = {}

    @property
    def total_bytes(self) -> int:
        return sum(entry.end - entry.start for entry in self._entries.values())

    @property
    def num_elements(self) -> int:
        return sum(prod(entry.shape) for entry in self._entries.values())

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def where(self, name: str) -> str:
        return str(self._entries[name].shard if name in self._entries else self._folder)

    def formats(self) -> Mapping[str, int]:
        sizes: Counter[str] = Counter()
        for entry in self._entries.values():
            sizes[entry.format] += entry.end - entry.start
        return sizes

    def read(self, name: str) -> HostTensor:
        entry = self._entries[name]
        dtype = PLAIN_DTYPES.get(entry.format)
        if dtype is None:
            raise ModelError(f"{entry.shard}: tensor {name} has the type {entry.format}, which cannot be served")
        flat = np.frombuffer(self._map(entry.shard), dtype, prod(entry.shape), entry.start)
        self._unread[entry.shard] -= 1
        if not self._unread[entry.shard]:
            del self._mapped[entry.shard]  # views of it keep it alive for as long as they are needed
        return HostTensor(entry.format, flat.reshape(entry.shape), entry.shape)

    def _map(self, shard: Path) -> mmap.mmap:
        if shard not in self._mapped:
            with shard.open("rb") as file:
                self._mapped[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._mapped[shard]

    def _check_index(self) -> None:
        index = self._folder / INDEX_FILE
        if not index.exists():
            return
        for name, shard in _weight_map(index).items():
            if name not in self._entries or self._entries[name].shard.name != shard:
                raise ModelError(f"{self._folder / shard}: tensor {name} is missing, though {index.name} puts it there")


def pickle_refused(path: Path) -> ModelError:
    """Reading a pickle can run any code that its author liked."""
    return ModelError(f"{path}: weights as a pickle are not opened, as they could run any code; convert to safetensors")


def _shards(folder: Path) -> list[Path]:
    """The files that hold the model's weights. Raises ModelError where there are none."""
    index = folder / INDEX_FILE
    if index.exists():
        return [folder / shard for shard in dict.fromkeys(_weight_map(index).values())]
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    pickles = sorted(path for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise pickle_refused(pickles[0])
    raise ModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name → file name, as the index has it."""
    try:
        content = json.loads(index.read_bytes())
    except ValueError as error:
        raise ModelError(f"{index}: not JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: no object weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{index}: tensor {name} is said to be in {shard!r}, which is no safetensors file here")
    return weight_map


def _read_header(shard: Path) -> dict[str, _Entry]:
    """Where each tensor of a file lies; the library checks the header (sizes, order, gaps, truncation)."""
    try:
        with safe_open(shard, framework="numpy"):
            pass
        with shard.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except FileNotFoundError:
        raise ModelError(f"{shard}: no such file") from None
    except (SafetensorError, ValueError, OSError) as error:
        raise ModelError(f"{shard}: truncated, corrupt or no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    first = 8 + header_bytes
    return {
        name: _Entry(
            shard=shard,
            format=info["dtype"],
            shape=tuple(info["shape"]),
            start=first + info["data_offsets"][0],
            end=first + info["data_offsets"][1],
        )
        for name, info in header.items()
    }
