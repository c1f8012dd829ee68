"""TritonKernels: the KernelSet on an NVIDIA GPU. What torch does well (arrays, cuBLAS, experts) stays torch's."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton

from kernels.interface import (
    Activation,
    Array,
    AttentionSpec,
    DType,
    HostWeight,
    LogprobsResult,
    RopeSpec,
    SamplingBatch,
)
from kernels.reference.arrays import TORCH_DTYPES
from kernels.reference.kv_cache import KVCache
from kernels.reference.torch_kernels import TorchKernels
from kernels.triton import attention, elementwise, linear, logprobs, norms, rope_store, rows, sampling
from kernels.triton.grouped_linear import grouped_linear
from kernels.triton.rows import gather_rows


class TritonKernels(TorchKernels):
    """On a CUDA device, or on the CPU in Triton's interpreter.

    `batch_invariant`: products of ours with one configuration for every batch in place of cuBLAS's faster ones.
    Raises ValueError for a CPU unless TRITON_INTERPRET=1 was set before this module was loaded.
    """

    name = "triton"

    def __init__(self, device: str, dtype: DType, num_threads: int, batch_invariant: bool = False) -> None:
        if torch.device(device).type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("the Triton kernels run on cuda; on cpu only in Triton's interpreter (TRITON_INTERPRET=1)")
        super().__init__(device, dtype, num_threads)
        self.batch_invariant = batch_invariant
        products = ", batch-invariant" if batch_invariant else ""
        self.description = f"triton {triton.__version__}{products}, {self.description}"

    def copy_blocks(self, kv_cache: KVCache, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        if np.isin(sources, targets).any():  # through a copy of what is read
            super().copy_blocks(kv_cache, sources, targets)
        elif len(sources):
            rows.copy_blocks(kv_cache, self.upload(sources), self.upload(targets))

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        norms.norm(x, weight, None, eps, out, residual, centred=False)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        norms.norm(x, weight, bias, eps, out, residual, centred=True)

    def add_gated(self, x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> None:
        elementwise.add_gated(x, y, gate)

    def gated_activation(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        elementwise.gated_activation(gate_up, activation, out)

    def activation(self, x: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        elementwise.activate(x, activation, out)

    def soft_cap(self, x: torch.Tensor, cap: float) -> None:
        elementwise.soft_cap(x, cap)

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        gather_rows(x, rows, out)

    def rope_and_store_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        rope: RopeSpec | None,
        kv_cache: KVCache,
        layer: int,
        slot_mapping: torch.Tensor,
    ) -> None:
        rope_store.rope_and_store_kv(q, k, v, positions, cos_sin, rope, kv_cache, layer, slot_mapping)

    # -- weights --------------------------------------------------------------------------------------------

    def pack_linear(self, parts: Sequence[HostWeight], bias: npt.NDArray[np.float32] | None = None) -> Array:
        packed = linear.pack_linear(parts, bias, TORCH_DTYPES[self.activation_dtype], self._device)
        self._weight_bytes += packed.num_bytes
        return packed

    def embedding(
        self, token_ids: torch.Tensor, weight: Array, out: torch.Tensor, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        linear.embedding(token_ids, weight, out, scale, accumulate)

    def linear(self, x: torch.Tensor, weight: Array, out: torch.Tensor) -> None:
        linear.linear(x, weight, out, self.batch_invariant)

    def grouped_linear(self, x: torch.Tensor, weight: Array, expert_ids: torch.Tensor, out: torch.Tensor) -> None:
        grouped_linear(x, weight.weight, expert_ids, out, self.batch_invariant)

    # -- attention ------------------------------------------------------------------------------------------

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

    # -- from logits to tokens ------------------------------------------------------------------------------

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> npt.NDArray[np.int32]:
        return sampling.sample(logits, batch)

    def logprobs(self, logits: torch.Tensor, token_ids: npt.NDArray[np.int32], top: int) -> LogprobsResult:
        return logprobs.logprobs(logits, token_ids, top)
