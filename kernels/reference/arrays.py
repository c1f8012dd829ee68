"""Between host arrays and torch tensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.INT8: torch.int8,
    DType.INT32: torch.int32,
    DType.INT64: torch.int64,
    DType.UINT64: torch.uint64,
}

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def from_host(host: npt.NDArray[Any]) -> torch.Tensor:
    """A CPU tensor with the host array's contents; shares memory where torch can (writable, contiguous)."""
    if not (host.flags.c_contiguous and host.flags.writeable):
        host = host.copy(order="C")
    if host.dtype == _BFLOAT16:
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(host)


def to_host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A copy on the host; the 16-bit float types become float32."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    result: npt.NDArray[Any] = tensor.cpu().contiguous().numpy()
    return result.copy()


def side_by_side(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """The rows of two arrays [T, …] as one view [T, width of both], where the second's lie right behind the first's,
    as slices of one buffer do; None where they do not. One operation can then do for both."""
    num_rows, row_stride = first.shape[0], first.stride(0)
    first_width, second_width = first[0].numel(), second[0].numel()
    if (
        second.data_ptr() != first.data_ptr() + first_width * first.element_size()
        or (num_rows > 1 and second.stride(0) != row_stride)  # the stride of a single row says nothing
        or first.dtype != second.dtype
        or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    ):
        return None
    return first.as_strided((num_rows, first_width + second_width), (row_stride, 1), first.storage_offset())
