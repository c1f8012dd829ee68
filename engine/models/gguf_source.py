"""Weights from a GGUF file, in the types that the file holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Final

from gguf.constants import GGMLQuantizationType

from engine.errors import ModelError
from engine.models.gguf_file import GGUFFile
from engine.models.source import PLAIN_DTYPES, HostTensor

NOT_SERVED: Final = ("F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0")  # nothing dequantises these


class GGUFSource:
    """The tensors of a GGUF model; see source.TensorSource."""

    def __init__(self, parts: Sequence[GGUFFile]) -> None:
        self._path = parts[0].path
        self._parts = {name: part.path for part in parts for name in part.tensors}
        self._tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}

    @classmethod
    def open(cls, path: Path) -> tuple[GGUFFile, GGUFSource]:
        """The model as one file, its parts (`…-00001-of-00003.gguf`) joined, and its tensors.

        Raises ModelError naming the part that is missing, damaged or not the first.
        """
        first = GGUFFile.open(path)
        count = first.get("split.count", int, 1)
        if count <= 1 or first.is_outline:
            return first, cls([first])
        name = re.fullmatch(r"(.+-)00001(-of-\d{5}\.gguf)", path.name)
        if name is None:
            raise ModelError(
                f"{path}: one of {count} parts; give the first, whose name ends in -00001-of-{count:05}.gguf"
            )
        others = [path.with_name(f"{name[1]}{number:05}{name[2]}") for number in range(2, count + 1)]
        source = cls([first, *map(GGUFFile.open, others)])
        return GGUFFile(path, first.metadata, source._tensors), source

    @property
    def total_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self._tensors.values())

    @property
    def num_elements(self) -> int:
        return sum(prod(tensor.shape) for tensor in self._tensors.values())

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def where(self, name: str) -> str:
        return str(self._parts.get(name, self._path))

    def formats(self) -> Mapping[str, int]:
        sizes: Counter[str] = Counter()
        for tensor in self._tensors.values():
            sizes[tensor.ggml_type.name] += tensor.size_bytes
        return sizes

    def read(self, name: str) -> HostTensor:
        tensor = self._tensors[name]
        if tensor.ggml_type.name in NOT_SERVED:
            raise ModelError(
                f"{self.where(name)}: tensor {name} has the type {tensor.ggml_type.name}, which cannot be served"
            )
        if not tensor.present:
            raise ModelError(f"{self.where(name)}: an outline of a model, without the data of tensor {name}")
        data = tensor.data()
        if tensor.ggml_type is GGMLQuantizationType.BF16:
            data = data.view(PLAIN_DTYPES["BF16"])
        return HostTensor(tensor.ggml_type.name, data, tensor.shape)
