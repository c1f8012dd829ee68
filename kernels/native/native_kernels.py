"""NativeKernels: the KernelSet over the extension module. Arrays are numpy arrays in host memory."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernels.interface import (
    Activation,
    Array,
    AttentionSpec,
    Csr,
    DType,
    HostWeight,
    KernelSet,
    KVCacheSpec,
    LogprobsResult,
    RopeSpec,
    SamplingBatch,
    StoredWeight,
)
from kernels.native import _native
from kernels.native.weights import WeightForm, pack
from kernels.timing import OperationTime, watched

_DTYPES: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.INT8: np.dtype(np.int8),
    DType.INT32: np.dtype(np.int32),
    DType.INT64: np.dtype(np.int64),
    DType.UINT64: np.dtype(np.uint64),
}
_ACTIVATIONS = {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2, Activation.RELU: 3}
_CACHE_KINDS = {DType.FLOAT32: 0, DType.BFLOAT16: 1, DType.INT8: 2}
_MAX_PLANS = 512  # recorded steps kept; the least recently used goes first
_ALIGNMENT = 64  # bytes of a cache line
_WIDE_ROW_BYTES = 1024


@dataclass(frozen=True, slots=True)
class KVCache:
    """One KV group's blocks, uint8 [num_blocks, bytes of a block], and where things lie in a block."""

    spec: KVCacheSpec
    blocks: npt.NDArray[np.uint8]
    layout: _native.KvLayout


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A plan, and which operation of the KernelSet each of its own belongs to."""

    plan: _native.Plan
    names: tuple[str, ...]


class NativeKernels(KernelSet):
    """Float32 activations; weights in float32, bfloat16, 8 or 4 bits; a KV cache in float32, bfloat16 or 8 bits.

    `dtype` BFLOAT16 keeps quantised weights at their own bits and others in bfloat16, as it does the KV cache; FLOAT32
    keeps all in float32, dequantised. `isa` forces one instruction set ("portable", "avx2", "avx512",
    "amx"); by default the environment's OCTAVO_ISA does, or the best that the machine has.
    """

    name = "native"
    activation_dtype = DType.FLOAT32
    batch_invariant = True

    def __init__(self, dtype: DType, num_threads: int = 1, isa: str | None = None) -> None:
        if dtype not in (DType.FLOAT32, DType.BFLOAT16):
            raise ValueError(f"the native kernels keep weights in float32 or bfloat16, not {dtype}")
        if num_threads < 1:
            raise ValueError("num_threads must be at least 1")
        self._session = _native.Session(os.environ.get("OCTAVO_ISA", "") if isa is None else isa, num_threads)
        self._attention_work = _native.AttentionWork()
        self._form = WeightForm.OWN_BITS if dtype is DType.BFLOAT16 else WeightForm.FLOAT32
        self.packed_format = f"native{_native.PACKED_VERSION}-{self._form.value.replace(' ', '-')}"
        self._weight_bytes = 0
        self._plans: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self.kv_dtype = dtype
        self.isa: str = self._session.isa
        self.num_threads: int = self._session.threads
        self.description = f"native C++ ({self.isa})"

    # -- memory ---------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        return _aligned(tuple(shape), _DTYPES[dtype])

    def upload(self, host: npt.NDArray[Any], dtype: DType | None = None) -> Array:
        array = _aligned(host.shape, host.dtype if dtype is None else _DTYPES[dtype])
        array[...] = host
        return array

    def write(self, target: Array, host: npt.NDArray[Any]) -> None:
        if target.shape != host.shape or target.dtype != host.dtype:
            raise ValueError(f"cannot write {host.dtype}{host.shape} into {target.dtype}{target.shape}")
        target[...] = host

    def download(self, array: Array) -> npt.NDArray[Any]:
        wide = array.dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
        return np.array(array, dtype=np.float32 if wide else array.dtype)

    def new_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        layout = _layout(spec)
        return KVCache(spec, np.zeros((spec.num_blocks, layout.block_bytes), np.uint8), layout)

    def kv_block_bytes(self, spec: KVCacheSpec) -> int:
        block_bytes: int = _layout(spec).block_bytes
        return block_bytes

    def copy_blocks(self, kv_cache: Array, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        self._refuse_recording("copy_blocks")
        self._session.copy_blocks(kv_cache.blocks, sources, targets)

    def move_blocks(
        self, source: Array, source_ids: npt.NDArray[np.int32], target: Array, target_ids: npt.NDArray[np.int32]
    ) -> None:
        for source_id, target_id in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
            target.blocks[target_id] = source.blocks[source_id]

    # -- weights --------------------------------------------------------------------------------------------

    def pack_linear(self, parts: Sequence[HostWeight], bias: npt.NDArray[np.float32] | None = None) -> Array:
        weight = pack(parts, bias, self._form)
        self._weight_bytes += weight.nbytes
        return weight

    def pack_experts(self, experts: Sequence[Sequence[HostWeight]]) -> Array:
        return [self.pack_linear(parts) for parts in experts]

    def pack_vector(self, host: npt.NDArray[np.float32]) -> Array:
        self._weight_bytes += host.nbytes
        return self.upload(host, DType.FLOAT32)

    def weight_bytes(self) -> int:
        return self._weight_bytes

    def export_weight(self, weight: Array) -> list[StoredWeight]:
        pieces = weight if isinstance(weight, list) else [weight]
        return [
            StoredWeight({"parts": [list(part) for part in piece.parts], "bias": piece.bias.tolist()}, piece.data)
            for piece in pieces
        ]

    def attach_weight(self, stored: Sequence[StoredWeight], shape: tuple[int, int]) -> Array:
        [piece] = stored
        return self._attach(piece, shape)

    def attach_experts(self, stored: Sequence[StoredWeight], shape: tuple[int, int]) -> Array:
        return [self._attach(piece, shape) for piece in stored]

    def _attach(self, stored: StoredWeight, shape: tuple[int, int]) -> _native.PackedWeight:
        parts = [tuple(part) for part in stored.description["parts"]]
        bias = np.asarray(stored.description["bias"], np.float32)
        weight = _native.attach(parts, stored.data, bias if bias.size else None)
        if tuple(weight.shape) != shape:
            raise ValueError(f"a weight of shape {tuple(weight.shape)}, not {shape}")
        self._weight_bytes += weight.nbytes
        return weight

    # -- the model's operations -----------------------------------------------------------------------------

    def embedding(
        self, token_ids: Array, weight: Array, out: Array, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        self._session.embedding(token_ids, weight, out, scale, accumulate)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, residual: Array | None = None) -> None:
        self._session.rms_norm(x, weight, eps, out, residual)

    def layer_norm(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        eps: float,
        out: Array,
        residual: Array | None = None,
    ) -> None:
        self._session.layer_norm(x, weight, bias, eps, out, residual)

    def add(self, x: Array, y: Array) -> None:
        self._session.add(x, y)

    def add_gated(self, x: Array, y: Array, gate: Array) -> None:
        self._session.add_gated(x, y, gate)

    def linear(self, x: Array, weight: Array, out: Array) -> None:
        self._session.linear(x, weight, out)

    def gated_activation(self, gate_up: Array, activation: Activation, out: Array) -> None:
        self._session.gated_activation(gate_up, _ACTIVATIONS[activation], out)

    def gated_mlp(
        self,
        x: Array,
        up: Array,
        activation: Activation,
        down: Array,
        gate_up: Array,
        activated: Array,
        out: Array,
    ) -> None:
        self._session.gated_mlp(x, up, _ACTIVATIONS[activation], down, gate_up, activated, out)

    def activation(self, x: Array, activation: Activation, out: Array) -> None:
        self._session.activation(x, _ACTIVATIONS[activation], out)

    def soft_cap(self, x: Array, cap: float) -> None:
        self._session.soft_cap(x, cap)

    def scale(self, x: Array, factor: float) -> None:
        self._session.scale(x, factor)

    def gather_rows(self, x: Array, rows: Array, out: Array) -> None:
        self._session.gather_rows(x, rows, out)

    def rope_and_store_kv(
        self,
        q: Array,
        k: Array,
        v: Array,
        positions: Array,
        cos_sin: Array | None,
        rope: RopeSpec | None,
        kv_cache: Array,
        layer: int,
        slot_mapping: Array,
    ) -> None:
        rotates = cos_sin is not None and rope is not None
        self._session.rope_and_store(
            q,
            k,
            v,
            positions,
            cos_sin if rotates else None,
            rope.rotary_dim if rope is not None else 0,
            rope is not None and rope.interleaved,
            kv_cache.blocks,
            kv_cache.layout,
            layer,
            slot_mapping,
        )

    def paged_attention(
        self,
        q: Array,
        kv_cache: Array,
        layer: int,
        block_tables: Array,
        query_start_loc: Array,
        seq_lens: Array,
        spec: AttentionSpec,
        out: Array,
    ) -> None:
        self._session.paged_attention(
            self._attention_work,
            q,
            kv_cache.blocks,
            kv_cache.layout,
            layer,
            block_tables,
            query_start_loc,
            seq_lens,
            spec.scale,
            spec.window or 0,
            spec.soft_cap or 0.0,
            out,
        )

    def route_experts(
        self, logits: Array, top_k: int, normalize: bool, expert_ids: Array, expert_weights: Array
    ) -> None:
        self._session.route_experts(logits, top_k, normalize, expert_ids, expert_weights)

    def grouped_linear(self, x: Array, weight: Array, expert_ids: Array, out: Array) -> None:
        self._session.grouped_linear(x, weight, expert_ids, out)

    def combine_experts(self, y: Array, expert_weights: Array, out: Array) -> None:
        self._session.combine_experts(y, expert_weights, out)

    # -- from logits to tokens ------------------------------------------------------------------------------

    def sample(self, logits: Array, batch: SamplingBatch) -> npt.NDArray[np.int32]:
        self._refuse_recording("sample")
        tokens = np.empty(logits.shape[0], np.int32)
        bias, penalties = batch.bias, batch.penalties
        self._session.sample(
            logits,
            tuple(map(np.ascontiguousarray, (batch.temperature, batch.top_p, batch.min_p))),
            tuple(map(np.ascontiguousarray, (batch.top_k, batch.choice_index, batch.output_position))),
            np.ascontiguousarray(batch.seed),
            _rows(batch.allowed),
            _rows(batch.banned),
            None if bias is None else (bias.row_starts, bias.token_ids, bias.values),
            None if penalties is None else (penalties.row_starts, penalties.token_ids, penalties.output_counts),
            None if penalties is None else (penalties.repetition, penalties.presence, penalties.frequency),
            tokens,
            None if batch.mask is None else (np.ascontiguousarray(batch.mask.rows), batch.mask.bits),
        )
        return tokens

    def logprobs(self, logits: Array, token_ids: npt.NDArray[np.int32], top: int) -> LogprobsResult:
        self._refuse_recording("logprobs")
        num_rows, vocab_size = logits.shape
        top = min(top, vocab_size)
        result = LogprobsResult(
            logprob=np.empty(num_rows, np.float32),
            rank=np.empty(num_rows, np.int32),
            top_token_ids=np.empty((num_rows, top), np.int32),
            top_logprobs=np.empty((num_rows, top), np.float32),
        )
        self._session.logprobs(
            logits, token_ids, result.logprob, result.rank, result.top_token_ids, result.top_logprobs
        )
        return result

    # -- steps ----------------------------------------------------------------------------------------------

    def run(self, shape_class: Hashable, forward: Callable[[], None]) -> None:
        """The first call for a shape class records what `forward` does; later ones replay it in one native call."""
        recorded = self._plans.get(shape_class)
        if recorded is None:
            self._record(shape_class, forward)
        else:
            self._plans.move_to_end(shape_class)
            self._session.replay(recorded.plan)

    def run_timed(self, shape_class: Hashable, forward: Callable[[], None]) -> list[OperationTime]:
        recorded = self._plans.get(shape_class)
        if recorded is None:
            self._record(shape_class, forward)
            return []
        self._plans.move_to_end(shape_class)
        ends = self._session.replay_timed(recorded.plan)
        return [
            OperationTime(name, begin, end)
            for name, begin, end in zip(recorded.names, [0.0, *ends[:-1]], ends, strict=True)
        ]

    def _record(self, shape_class: Hashable, forward: Callable[[], None]) -> None:
        names: list[str] = []

        def ended(name: str) -> None:
            names.extend([name] * (self._session.recorded - len(names)))

        self._session.start_recording()
        try:
            with watched(self, lambda name: None, ended):
                forward()
            self._plans[shape_class] = _Recorded(self._session.finish_recording(), tuple(names))
        finally:
            self._session.abandon_recording()
        if len(self._plans) > _MAX_PLANS:
            self._plans.popitem(last=False)

    def close(self) -> None:
        self._plans.clear()

    def _refuse_recording(self, operation: str) -> None:
        if self._session.recording:
            raise RuntimeError(f"{operation} cannot be part of a recorded forward pass")


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An uninitialised array that starts on a cache line. Wide rows lie an odd number of lines apart: rows that met in
    the same cache sets would push each other out."""
    if len(shape) == 2 and shape[0] > 1 and shape[1] * dtype.itemsize >= _WIDE_ROW_BYTES:
        per_line = _ALIGNMENT // dtype.itemsize
        lines = -(-shape[1] // per_line) | 1
        wide: npt.NDArray[Any] = _aligned((shape[0] * lines * per_line,), dtype)
        return wide.reshape(shape[0], lines * per_line)[:, : shape[1]]
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _layout(spec: KVCacheSpec) -> _native.KvLayout:
    kind = _CACHE_KINDS.get(spec.dtype)
    if kind is None:
        names = ", ".join(_CACHE_KINDS)
        raise ValueError(f"the native kernels keep the KV cache in one of {names}, not {spec.dtype}")
    return _native.kv_layout(
        kind, spec.num_layers, spec.block_size, spec.num_kv_heads, spec.head_dim, spec.value_head_dim
    )


def _rows(csr: Csr | None) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None:
    return None if csr is None else (csr.row_starts, csr.token_ids)
