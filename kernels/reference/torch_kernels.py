"""TorchKernels: the KernelSet in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import (
    Activation,
    AttentionSpec,
    DType,
    HostWeight,
    KernelSet,
    KVCacheSpec,
    LogprobsResult,
    RopeSpec,
    SamplingBatch,
)
from kernels.reference import attention, linear, pointwise, sampling
from kernels.reference.arrays import TORCH_DTYPES, from_host, side_by_side, to_host
from kernels.reference.kv_cache import KVCache, block_bytes, locate_slots, new_kv_cache, store
from kernels.reference.linear import LinearWeight


class TorchKernels(KernelSet):
    """Torch on a CPU or a CUDA device.

    `num_threads` is torch's for the whole process (on a CPU). Within run() the index arrays of a step are read once
    and what follows from them is kept for all layers.
    """

    name = "torch"
    batch_invariant = False  # the libraries choose their algorithms by shape

    def __init__(self, device: str, dtype: DType, num_threads: int) -> None:
        self.activation_dtype = dtype
        self.kv_dtype = dtype
        self._device = torch.device(device)
        self._weight_bytes = 0
        self._scalars: dict[float, torch.Tensor] = {}  # constants of the model, as arrays
        self._step_plans: dict[Hashable, Any] | None = None  # within run()
        self._copy_stream: torch.cuda.Stream | None = None
        if self._device.type == "cpu":
            torch.set_num_threads(num_threads)
            where = f"cpu ({torch.backends.cpu.get_cpu_capability()})"
        else:
            self._copy_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            where = f"{self._device} ({torch.cuda.get_device_name(self._device)})"
        self.description = f"torch {torch.__version__}, {where}"

    # -- memory ---------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: DType) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype], device=self._device)

    def upload(self, host: npt.NDArray[Any], dtype: DType | None = None) -> torch.Tensor:
        return from_host(host).to(device=self._device, dtype=None if dtype is None else TORCH_DTYPES[dtype])

    def write(self, target: torch.Tensor, host: npt.NDArray[Any]) -> None:
        target.copy_(from_host(host))

    def download(self, array: torch.Tensor) -> npt.NDArray[Any]:
        return to_host(array)

    def new_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        return new_kv_cache(spec, self._device)

    def new_host_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        """Beside a GPU in pinned memory, without views of the layers."""
        cache = new_kv_cache(spec, torch.device("cpu"))
        return cache if self._copy_stream is None else KVCache(spec, cache.blocks.pin_memory(), ())

    def kv_block_bytes(self, spec: KVCacheSpec) -> int:
        return block_bytes(spec)

    def device_memory_available_bytes(self) -> int | None:
        if self._device.type == "cpu":
            return None
        return int(torch.cuda.mem_get_info(self._device)[0])

    def copy_blocks(self, kv_cache: KVCache, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        if len(sources):
            rows = kv_cache.blocks.index_select(0, from_host(sources).to(self._device))
            kv_cache.blocks.index_copy_(0, from_host(targets).to(device=self._device, dtype=torch.int64), rows)

    def move_blocks(
        self, source: KVCache, source_ids: npt.NDArray[np.int32], target: KVCache, target_ids: npt.NDArray[np.int32]
    ) -> None:
        """On a GPU on a stream of its own, so that one DMA follows the other; what is computed next waits for it."""
        pairs = list(zip(source_ids.tolist(), target_ids.tolist(), strict=True))
        if self._copy_stream is None:
            for source_id, target_id in pairs:
                target.blocks[target_id] = source.blocks[source_id]
            return
        computing = torch.cuda.current_stream(self._device)
        self._copy_stream.wait_stream(computing)
        with torch.cuda.stream(self._copy_stream):
            for source_id, target_id in pairs:
                target.blocks[target_id].copy_(source.blocks[source_id], non_blocking=True)
        computing.wait_stream(self._copy_stream)

    # -- weights --------------------------------------------------------------------------------------------

    def pack_linear(self, parts: Sequence[HostWeight], bias: npt.NDArray[np.float32] | None = None) -> LinearWeight:
        return self._count(linear.pack_linear(parts, bias, TORCH_DTYPES[self.activation_dtype], self._device))

    def pack_experts(self, experts: Sequence[Sequence[HostWeight]]) -> LinearWeight:
        return self._count(linear.pack_experts(experts, TORCH_DTYPES[self.activation_dtype], self._device))

    def pack_vector(self, host: npt.NDArray[np.float32]) -> torch.Tensor:
        vector = from_host(host).to(device=self._device, dtype=torch.float32)
        self._weight_bytes += vector.nbytes
        return vector

    def weight_bytes(self) -> int:
        return self._weight_bytes

    def _count(self, packed: LinearWeight) -> LinearWeight:
        self._weight_bytes += packed.weight.nbytes + (0 if packed.bias is None else packed.bias.nbytes)
        return packed

    # -- the model's operations -----------------------------------------------------------------------------

    def embedding(
        self,
        token_ids: torch.Tensor,
        weight: LinearWeight,
        out: torch.Tensor,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        linear.embedding(token_ids, weight, out, scale, accumulate)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        pointwise.rms_norm(x, weight, self._scalar(eps), out, residual)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        pointwise.layer_norm(x, weight, bias, eps, out, residual)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y)

    def add_gated(self, x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> None:
        x.copy_(torch.addcmul(x.float(), torch.sigmoid(gate), y.float()))

    def linear(self, x: torch.Tensor, weight: LinearWeight, out: torch.Tensor) -> None:
        linear.linear(x, weight, out)

    def gated_activation(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        width = out.shape[-1]
        torch.mul(pointwise.activate(gate_up[..., :width], activation), gate_up[..., width:], out=out)

    def activation(self, x: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        out.copy_(pointwise.activate(x, activation))

    def soft_cap(self, x: torch.Tensor, cap: float) -> None:
        x.div_(cap).tanh_().mul_(cap)

    def scale(self, x: torch.Tensor, factor: float) -> None:
        x.mul_(factor)

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(x, 0, rows, out=out)

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
        if q.shape[0] == 0:
            return
        if cos_sin is not None and rope is not None:
            cos, sin = self._once_a_step(
                ("rope", cos_sin.data_ptr(), positions.data_ptr(), rope),
                lambda: pointwise.rotation_rows(cos_sin, positions, rope),
            )
            both = side_by_side(q, k)
            if both is not None:
                pointwise.rotate(both.view(q.shape[0], -1, q.shape[2]), cos, sin, rope)
            else:
                pointwise.rotate(q, cos, sin, rope)
                pointwise.rotate(k, cos, sin, rope)
        block_size = kv_cache.spec.block_size
        slots = self._once_a_step(
            ("slots", slot_mapping.data_ptr(), block_size), lambda: locate_slots(slot_mapping, block_size)
        )
        store(kv_cache.layers[layer], slots, k, v)

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
        block_size, window = kv_cache.spec.block_size, spec.window
        plan = self._once_a_step(
            ("attention", block_tables.data_ptr(), query_start_loc.data_ptr(), seq_lens.data_ptr(), block_size, window),
            lambda: attention.plan_attention(block_tables, query_start_loc, seq_lens, block_size, window, q.dtype),
        )
        attention.paged_attention(q, kv_cache, layer, plan, spec, out)

    def route_experts(
        self,
        logits: torch.Tensor,
        top_k: int,
        normalize: bool,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
    ) -> None:
        linear.route_experts(logits, top_k, normalize, expert_ids, expert_weights)

    def grouped_linear(
        self, x: torch.Tensor, weight: LinearWeight, expert_ids: torch.Tensor, out: torch.Tensor
    ) -> None:
        linear.grouped_linear(x, weight, expert_ids, out)

    def combine_experts(self, y: torch.Tensor, expert_weights: torch.Tensor, out: torch.Tensor) -> None:
        linear.combine_experts(y, expert_weights, out)

    # -- from logits to tokens ------------------------------------------------------------------------------

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> npt.NDArray[np.int32]:
        return sampling.sample(logits, batch)

    def logprobs(self, logits: torch.Tensor, token_ids: npt.NDArray[np.int32], top: int) -> LogprobsResult:
        return sampling.logprobs(logits, token_ids, top)

    # -- steps ----------------------------------------------------------------------------------------------

    def run(self, shape_class: Hashable, forward: Callable[[], None]) -> None:
        self._step_plans = {}
        try:
            with torch.inference_mode():
                forward()
        finally:
            self._step_plans = None

    def range_begun(self, name: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def range_ended(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _scalar(self, value: float) -> torch.Tensor:
        scalar = self._scalars.get(value)
        if scalar is None:
            scalar = self._scalars[value] = torch.tensor(value, dtype=torch.float32, device=self._device)
        return scalar

    def _once_a_step(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """make()'s result, kept until the end of run(); outside of run() made anew each time."""
        if self._step_plans is None:
            return make()
        plan = self._step_plans.get(key)
        if plan is None:
            plan = self._step_plans[key] = make()
        return plan
