"""A KernelSet without arithmetic and without torch: arrays are numpy's, operations do nothing, every token is 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.interface import Array, DType, KernelSet, LogprobsResult, SamplingBatch

TOKEN = 3


def _nothing(*_: object, **__: object) -> None:
    return None


class _NullMemory(KernelSet):
    name = "null"
    description = "nothing"
    activation_dtype = DType.FLOAT32
    batch_invariant = True

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        return np.zeros(shape, np.float32 if dtype is DType.BFLOAT16 else dtype.value)

    def upload(self, host: npt.NDArray[Any], dtype: DType | None = None) -> Array:
        return host if dtype is None else host.astype(dtype.value)

    def write(self, target: Array, host: npt.NDArray[Any]) -> None:
        target[...] = host

    def download(self, array: Array) -> npt.NDArray[Any]:
        return np.array(array)

    def sample(self, logits: Array, batch: SamplingBatch) -> npt.NDArray[np.int32]:
        return np.full(len(logits), TOKEN, np.int32)

    def logprobs(self, logits: Array, token_ids: npt.NDArray[np.int32], top: int) -> LogprobsResult:
        zeros = np.zeros((len(logits), top), np.float32)
        return LogprobsResult(zeros.sum(axis=1), np.ones(len(logits), np.int32), zeros.astype(np.int32), zeros)


def null_kernels() -> KernelSet:
    """Every operation that is still abstract does nothing."""
    operations = dict.fromkeys(_NullMemory.__abstractmethods__, _nothing)
    return type("NullKernels", (_NullMemory,), operations)()  # type: ignore[no-any-return]
