"""TritonKernels: the KernelSet on an NVIDIA GPU. What torch does well (arrays, cuBLAS, experts) stays torch's."""

from __future__ import annotations

import os

import torch
import triton

from kernels.interface import AttentionSpec, DType
from kernels.reference.kv_cache import KVCache
from kernels.reference.torch_kernels import TorchKernels
from kernels.triton import attention


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

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: KVCache,
        layer: int,
        block_tables: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        spec: AttentionSpec,
        out: torch.Tensor,
    ) -> None:
        attention.paged_attention(
            q, kv_cache, layer, block_tables, query_start_loc, seq_lens, spec, out, by_segments=self.batch_invariant
        )
