"""TritonKernels: the KernelSet on an NVIDIA GPU. What torch does well (arrays, cuBLAS, experts) stays torch's."""

from __future__ import annotations

import os

import torch
import triton

from kernels.interface import DType
from kernels.reference.torch_kernels import TorchKernels


class TritonKernels(TorchKernels):
    """On a CUDA device, or on the CPU in Triton's interpreter.

    Raises ValueError for a CPU unless TRITON_INTERPRET=1 was set before this module was loaded.
    """

    name = "triton"

    def __init__(self, device: str, dtype: DType, num_threads: int) -> None:
        if torch.device(device).type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("the Triton kernels run on cuda; on cpu only in Triton's interpreter (TRITON_INTERPRET=1)")
        super().__init__(device, dtype, num_threads)
        self.description = f"triton {triton.__version__}, {self.description}"
