"""Where weights come from: a named set of host tensors, read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

PLAIN_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor as its file holds it, usually a view of the mapped file.

    `format` and the last axis of `data` are as in kernels.interface.HostWeight; `shape` counts elements.
    """

    format: str
    data: npt.NDArray[Any]
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """The tensors of a model's files."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""

    @property
    def num_elements(self) -> int:
        """Elements of all tensors."""

    def names(self) -> tuple[str, ...]:
        """Every tensor, in file order."""

    def where(self, name: str) -> str:
        """The file that holds the tensor, for messages; for a name that is in none, the file or folder as a whole."""

    def formats(self) -> Mapping[str, int]:
        """Bytes by format."""

    def read(self, name: str) -> HostTensor:
        """One tensor. Each is read at most once: a shard whose tensors have all been read is let go.

        Raises ModelError naming file, tensor and reason.
        """
