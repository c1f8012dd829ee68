from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]
_Tuple = tuple[_Array, ...]

class Plan:
    def __len__(self) -> int: ...

class PackedWeight:
    rows: int
    columns: int
    nbytes: int
    shape: tuple[int, int]
    kinds: list[str]
    parts: list[tuple[int, int, int, int, int]]
    data: npt.NDArray[np.uint8]
    bias: npt.NDArray[np.float32]

class KvLayout:
    block_bytes: int
    block_size: int

class AttentionWork: ...

class Session:
    isa: str
    threads: int
    recording: bool
    recorded: int  # operations of the plan that is being recorded
    def __init__(self, isa: str, threads: int) -> None: ...
    def start_recording(self) -> None: ...
    def finish_recording(self) -> Plan: ...
    def abandon_recording(self) -> None: ...
    def replay(self, plan: Plan) -> None: ...
    def replay_timed(self, plan: Plan) -> list[float]: ...
    def rms_norm(self, x: _Array, weight: _Array, eps: float, out: _Array, residual: _Array | None) -> None: ...
    def layer_norm(
        self, x: _Array, weight: _Array, bias: _Array | None, eps: float, out: _Array, residual: _Array | None
    ) -> None: ...
    def gated_activation(self, gate_up: _Array, activation: int, out: _Array) -> None: ...
    def activation(self, x: _Array, activation: int, out: _Array) -> None: ...
    def soft_cap(self, x: _Array, cap: float) -> None: ...
    def scale(self, x: _Array, factor: float) -> None: ...
    def add(self, x: _Array, y: _Array) -> None: ...
    def add_gated(self, x: _Array, y: _Array, gate: _Array) -> None: ...
    def gather_rows(self, x: _Array, rows: _Array, out: _Array) -> None: ...
    def embedding(
        self, token_ids: _Array, weight: PackedWeight, out: _Array, scale: float, accumulate: bool
    ) -> None: ...
    def linear(self, x: _Array, weight: PackedWeight, out: _Array) -> None: ...
    def gated_mlp(
        self,
        x: _Array,
        up: PackedWeight,
        activation: int,
        down: PackedWeight,
        gate_up: _Array,
        activated: _Array,
        out: _Array,
    ) -> None: ...
    def grouped_linear(self, x: _Array, experts: list[PackedWeight], expert_ids: _Array, out: _Array) -> None: ...
    def route_experts(
        self, logits: _Array, top_k: int, normalize: bool, expert_ids: _Array, expert_weights: _Array
    ) -> None: ...
    def combine_experts(self, y: _Array, expert_weights: _Array, out: _Array) -> None: ...
    def rope_and_store(
        self,
        q: _Array,
        k: _Array,
        v: _Array,
        positions: _Array,
        cos_sin: _Array | None,
        rotary: int,
        interleaved: bool,
        blocks: npt.NDArray[np.uint8],
        layout: KvLayout,
        layer: int,
        slots: _Array,
    ) -> None: ...
    def paged_attention(
        self,
        work: AttentionWork,
        q: _Array,
        blocks: npt.NDArray[np.uint8],
        layout: KvLayout,
        layer: int,
        block_tables: _Array,
        query_start_loc: _Array,
        seq_lens: _Array,
        scale: float,
        window: int,
        soft_cap: float,
        out: _Array,
    ) -> None: ...
    def copy_blocks(self, blocks: npt.NDArray[np.uint8], sources: _Array, targets: _Array) -> None: ...
    def sample(
        self,
        logits: _Array,
        floats: _Tuple,
        ints: _Tuple,
        seed: _Array,
        allowed: _Tuple | None,
        banned: _Tuple | None,
        bias: _Tuple | None,
        penalties: _Tuple | None,
        factors: _Tuple | None,
        tokens: _Array,
        mask: _Tuple | None = None,
    ) -> None: ...
    def logprobs(
        self,
        logits: _Array,
        token_ids: _Array,
        logprob: _Array,
        rank: _Array,
        top_ids: _Array,
        top_logprobs: _Array,
    ) -> None: ...
    def philox(self, seed: int, token: int, position: int, choice: int) -> list[int]: ...

def available_isas() -> str: ...
def kv_layout(kind: int, layers: int, block_size: int, kv_heads: int, d: int, dv: int) -> KvLayout: ...
def pack(
    parts: Sequence[tuple[str, npt.NDArray[np.uint8], int, int]], bf16: bool, bias: _Array | None, threads: int = 1
) -> PackedWeight: ...
def attach(parts: list[tuple[int, ...]], data: npt.NDArray[np.uint8], bias: _Array | None) -> PackedWeight: ...

PACKED_VERSION: int
