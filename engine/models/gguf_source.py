"""Weights from a GGUF file, in the types that the file holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Final

from gguf.constants import GGMLQuantizationType

from engine.errors import ModelError
from engine.models.gguf_file import GGUFFile
from engine.models.source import PLAIN_DTYPES, HostTensor

_NOT_SERVED: Final = ("F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0")  # nothing dequantises these


class GGUFSource:
    """The tensors of one GGUF file; see source.TensorSource."""

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf

    @property
    def total_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self._gguf.tensors.values())

    @property
    def num_elements(self) -> int:
        return sum(prod(tensor.shape) for tensor in self._gguf.tensors.values())

    def names(self) -> tuple[str, ...]:
        return tuple(self._gguf.tensors)

    def where(self, name: str) -> str:
        return str(self._gguf.path)

    def formats(self) -> Mapping[str, int]:
        sizes: Counter[str] = Counter()
        for tensor in self._gguf.tensors.values():
            sizes[tensor.ggml_type.name] += tensor.size_bytes
        return sizes

    def read(self, name: str) -> HostTensor:
        tensor = self._gguf.tensors[name]
        if tensor.ggml_type.name in _NOT_SERVED:
            raise ModelError(
                f"{self.where(name)}: tensor {name} has the type {tensor.ggml_type.name}, which cannot be served"
            )
        data = tensor.data()
        if tensor.ggml_type is GGMLQuantizationType.BF16:
            data = data.view(PLAIN_DTYPES["BF16"])
        return HostTensor(tensor.ggml_type.name, data, tensor.shape)
