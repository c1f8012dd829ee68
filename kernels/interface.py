"""KernelSet: the only arithmetic the models and the runner may use. One signature per operation, several backends.

Arrays are opaque to callers. They come from the KernelSet, and callers may do four things with one: read `.shape`,
take basic slices (`a[i:j]`, `a[:, i:j]`), split the last axis with `.reshape` (always a view here) and pass it back.
Unless said otherwise an array argument has a contiguous last axis and any row stride; outputs never alias inputs
unless the operation says "in place".

Rules for every operation:
- results go into buffers given by the caller; nothing is allocated per call that outlives it;
- row r of an output depends on row r of the inputs (and on the sequence it belongs to) alone: never on the number
  of rows, on its neighbours or on the thread count. A backend that holds this only up to rounding says so in
  `batch_invariant`;
- index arrays are int32 unless said otherwise; accumulation is in float32 or wider;
- zero rows are legal and do nothing.

Letters in shapes: T tokens of a step, S sequences, R rows of logits, H hidden, V vocabulary, D head_dim,
E experts, K/N inputs/outputs of a linear.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.timing import OperationTime, watched

Array = Any  # opaque: torch.Tensor or numpy.ndarray, whatever the KernelSet allocates


class DType(StrEnum):
    """Element types of arrays. The activations' type is KernelSet.activation_dtype."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  # of a KV cache: codes with a float32 scale per token and head
    INT32 = "int32"
    INT64 = "int64"
    UINT64 = "uint64"


class Activation(StrEnum):
    """SILU: x·σ(x). GELU: exact, erf. GELU_TANH: the tanh approximation. RELU."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


@dataclass(frozen=True, slots=True)
class HostWeight:
    """A weight matrix [rows, columns] on the host as its file holds it.

    `format` is a numpy-like type ("F32", "F16", "BF16") with `data` of that dtype (ml_dtypes.bfloat16 for BF16) and
    shape [rows, columns], or the name of a GGUF block type ("Q8_0", "Q4_1", "Q4_K", …) with `data` uint8
    [rows, bytes_per_row]. Ours besides: "INT8", per row a float16 scale and `columns` codes; "INT4_G32", "INT4_G64",
    "INT4_G128", per group a float16 scale and two's-complement nibbles, even index low; the last group of a row is
    filled up with zeros. Rows are outputs: y = x · Wᵀ.
    """

    format: str
    data: npt.NDArray[Any]
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A packed weight as bytes: what lies in a file between export_weight() and attach_weight()."""

    description: Any  # the backend's own; as JSON takes it
    data: npt.NDArray[np.uint8]  # [bytes]; to be attached it must start on a cache line


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The cache of one KV group: `num_layers` layers of equal shape."""

    num_layers: int
    num_blocks: int  # including the null block 0
    block_size: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What the attention of one layer does; constant over a model's life."""

    scale: float  # multiplies q·k
    window: int | None = None  # a query at position p sees keys at positions > p − window; None = all up to p
    soft_cap: float | None = None  # scores s become cap · tanh(s / cap) before the mask


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotation of the first `rotary_dim` of each head.

    Pairs are (i, i + rotary_dim/2) ("neox" style) or, when interleaved, (2i, 2i + 1).
    """

    rotary_dim: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to choose one token from each row of logits: host arrays, one entry per row.

    Sparse parts are in CSR form: entries of row r are row_starts[r] … row_starts[r + 1] − 1.
    """

    temperature: npt.NDArray[np.float32]  # [R], 0 = greedy
    top_k: npt.NDArray[np.int32]  # [R], 0 = off
    top_p: npt.NDArray[np.float32]  # [R]
    min_p: npt.NDArray[np.float32]  # [R]
    seed: npt.NDArray[np.uint64]  # [R], the Philox key
    choice_index: npt.NDArray[np.int32]  # [R]
    output_position: npt.NDArray[np.int32]  # [R]
    # masks: tokens that cannot be drawn
    mask: TokenMask | None = None  # by a grammar
    allowed: Csr | None = None  # rows with at least one entry may draw only these; rows without are free
    banned: Csr | None = None  # never drawn (bad words, stop tokens before min_tokens)
    # bias: added to the logits
    bias: CsrValues | None = None
    # penalties: entries are the tokens that occur in prompt or outputs
    penalties: Penalties | None = None


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Dense masks for some of the rows: those in a grammar's hands."""

    rows: npt.NDArray[np.int32]  # [R]: which of the masks is this row's; −1 = none, it is free
    bits: npt.NDArray[np.uint32]  # [M, ⌈V / 32⌉]; bit t mod 32 of word t // 32 is set: token t may be drawn


@dataclass(frozen=True, slots=True)
class Csr:
    row_starts: npt.NDArray[np.int32]  # [R + 1]
    token_ids: npt.NDArray[np.int32]  # [nnz], ascending within a row


@dataclass(frozen=True, slots=True)
class CsrValues:
    row_starts: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]  # distinct within a row
    values: npt.NDArray[np.float32]  # [nnz]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Per seen token: the logit divided by `repetition` if positive, multiplied if not; then, as in the OpenAI formula,
    less frequency · count, less presence where count > 0. float32, in this order.
    """

    row_starts: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]  # tokens seen in prompt or outputs, distinct within a row
    output_counts: npt.NDArray[np.int32]  # occurrences among the outputs; 0 = only in the prompt
    repetition: npt.NDArray[np.float32]  # [R], 1 = off
    presence: npt.NDArray[np.float32]  # [R]
    frequency: npt.NDArray[np.float32]  # [R]


@dataclass(frozen=True, slots=True)
class LogprobsResult:
    """Per row: the asked token's log-softmax and rank, and the `top` most likely tokens.

    The rank is the token's place in that order: 1 + the more likely ones + the equally likely with a lower id.
    """

    logprob: npt.NDArray[np.float32]  # [R]
    rank: npt.NDArray[np.int32]  # [R]
    top_token_ids: npt.NDArray[np.int32]  # [R, top], most likely first, ties by lowest id
    top_logprobs: npt.NDArray[np.float32]  # [R, top]


class KernelSet(ABC):
    """One backend. Not thread-safe: one caller at a time."""

    name: str  # "torch", "native", "triton"
    description: str  # what was chosen, for people: library, instruction set; the same text means the same arithmetic
    activation_dtype: DType
    kv_dtype: DType  # what a KV cache is kept in unless asked otherwise
    batch_invariant: bool  # rows are bit-for-bit independent of the batch
    packed_format: str | None = None  # names what export_weight() gives; None: weights cannot be exported

    # -- memory ---------------------------------------------------------------------------------------------

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        """A new array; contents undefined."""

    @abstractmethod
    def upload(self, host: npt.NDArray[Any], dtype: DType | None = None) -> Array:
        """A new array with the host's contents, converted to `dtype` when given. May share memory with `host`."""

    @abstractmethod
    def write(self, target: Array, host: npt.NDArray[Any]) -> None:
        """Copy `host` (same shape and element type) into `target`; `host` may be reused on return."""

    @abstractmethod
    def download(self, array: Array) -> npt.NDArray[Any]:
        """The contents as a host array (float32 for BF16 and F16); a copy, valid for ever."""

    @abstractmethod
    def new_kv_cache(self, spec: KVCacheSpec) -> Array:
        """The cache of one KV group, zeroed. Its layout is the backend's own; all layers of a block lie contiguous."""

    def new_host_kv_cache(self, spec: KVCacheSpec) -> Array:
        """A cache in the host's memory for move_blocks(), its blocks laid out as new_kv_cache() does."""
        return self.new_kv_cache(spec)

    @abstractmethod
    def kv_block_bytes(self, spec: KVCacheSpec) -> int:
        """Bytes that new_kv_cache takes per block."""

    def device_memory_available_bytes(self) -> int | None:
        """Bytes of the device's own memory that can still be taken; None: arrays live in the host's memory."""
        return None

    @abstractmethod
    def copy_blocks(self, kv_cache: Array, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        """Copy whole blocks (all layers) source → target. All reads happen before any write; targets are distinct.
        Both arrays are contiguous."""

    @abstractmethod
    def move_blocks(
        self, source: Array, source_ids: npt.NDArray[np.int32], target: Array, target_ids: npt.NDArray[np.int32]
    ) -> None:
        """Copy whole blocks (all layers) from one cache to another, one of the device's and one of the host's, whose
        specs differ in num_blocks alone. Target ids are distinct. What is called later sees the copies."""

    # -- weights --------------------------------------------------------------------------------------------

    @abstractmethod
    def pack_linear(self, parts: Sequence[HostWeight], bias: npt.NDArray[np.float32] | None = None) -> Array:
        """A weight for linear() and embedding(): the parts stacked along the outputs, in the backend's layout.

        Parts may have different formats. `bias` is float32 [N].
        """

    @abstractmethod
    def pack_experts(self, experts: Sequence[Sequence[HostWeight]]) -> Array:
        """A weight for grouped_linear(): per expert its parts, stacked along the outputs; equal shapes."""

    @abstractmethod
    def pack_vector(self, host: npt.NDArray[np.float32]) -> Array:
        """A norm's weight or bias, kept in float32."""

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that the weights packed so far take."""

    def export_weight(self, weight: Array) -> list[StoredWeight]:
        """A weight of pack_linear() as one piece, one of pack_experts() as a piece per expert."""
        raise NotImplementedError(f"{self.name} kernels export no weights")

    def attach_weight(self, stored: Sequence[StoredWeight], shape: tuple[int, int]) -> Array:
        """What pack_linear() gave, over the memory of the one piece; it stays alive with the weight. Raises ValueError
        if it is no weight of that shape [outputs, inputs]."""
        raise NotImplementedError(f"{self.name} kernels attach no weights")

    def attach_experts(self, stored: Sequence[StoredWeight], shape: tuple[int, int]) -> Array:
        """The same for pack_experts(): a piece per expert, each of that shape."""
        raise NotImplementedError(f"{self.name} kernels attach no weights")

    # -- the model's operations -----------------------------------------------------------------------------

    @abstractmethod
    def embedding(
        self, token_ids: Array, weight: Array, out: Array, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        """out[t] = scale · weight[token_ids[t]] (added to out when accumulate). token_ids [T], out [T, H]."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, residual: Array | None = None) -> None:
        """out = x / sqrt(mean(x²) + eps) · weight over the last axis; the mean is taken in float32.

        x, out: [T, H], or [T, heads, D] normalised per head (out may be x: in place). With `residual` [T, H]:
        residual += x first, in place, and the sum is what is normalised.
        """

    @abstractmethod
    def layer_norm(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        eps: float,
        out: Array,
        residual: Array | None = None,
    ) -> None:
        """out = (x − mean) / sqrt(var + eps) · weight + bias; `residual` as in rms_norm."""

    @abstractmethod
    def add(self, x: Array, y: Array) -> None:
        """x += y, in place. [T, H]."""

    @abstractmethod
    def add_gated(self, x: Array, y: Array, gate: Array) -> None:
        """x[t] += σ(gate[t]) · y[t], in place: an expert behind a gate. x, y [T, H], gate float32 [T, 1]."""

    @abstractmethod
    def linear(self, x: Array, weight: Array, out: Array) -> None:
        """out = x · Wᵀ + bias. x [T, K], out [T, N]; out may be float32 whatever the activations are (logits)."""

    @abstractmethod
    def gated_activation(self, gate_up: Array, activation: Activation, out: Array) -> None:
        """out = act(gate) · up, with gate_up [T, 2·I] = gate beside up, out [T, I]; or [T, k, 2·I] and [T, k, I],
        both contiguous (experts)."""

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
        """out = down(act(gate) · up), gate beside up = x · Wᵀ of the weight `up`. x [T, H], out [T, H].

        gate_up [T, 2·I] and activated [T, I] are work space: their contents are undefined afterwards.
        """
        self.linear(x, up, gate_up)
        self.gated_activation(gate_up, activation, activated)
        self.linear(activated, down, out)

    @abstractmethod
    def activation(self, x: Array, activation: Activation, out: Array) -> None:
        """out = act(x); out may be x."""

    @abstractmethod
    def soft_cap(self, x: Array, cap: float) -> None:
        """x = cap · tanh(x / cap), in place."""

    @abstractmethod
    def scale(self, x: Array, factor: float) -> None:
        """x *= factor, in place."""

    @abstractmethod
    def gather_rows(self, x: Array, rows: Array, out: Array) -> None:
        """out[r] = x[rows[r]]. x [T, H], rows int32 [R], out [R, H]."""

    @abstractmethod
    def rope_and_store_kv(
        self,
        q: Array,  # [T, q_heads, D], rotated in place
        k: Array,  # [T, kv_heads, D], rotated in place
        v: Array,  # [T, kv_heads, Dv]
        positions: Array,  # int32 [T]
        cos_sin: Array | None,  # float32 [max_position, rotary_dim]: cosines beside sines; None = no rotation
        rope: RopeSpec | None,
        kv_cache: Array,
        layer: int,  # within the group
        slot_mapping: Array,  # int64 [T]; −1 = padding: not stored
    ) -> None:
        """Rotate q and k by their integer positions (float32 arithmetic) and write k and v to their slots."""

    @abstractmethod
    def paged_attention(
        self,
        q: Array,  # [T, q_heads, D]
        kv_cache: Array,
        layer: int,
        block_tables: Array,  # int32 [S, max_blocks]; entries past seq_lens are undefined
        query_start_loc: Array,  # int32 [S + 1]: tokens query_start_loc[s] … of sequence s
        seq_lens: Array,  # int32 [S]: tokens visible to the last query of s, itself included
        spec: AttentionSpec,
        out: Array,  # [T, q_heads, Dv]
    ) -> None:
        """Causal attention of every query over its sequence's cached keys; prefill chunks, decodes, any mixture.

        Query t of a sequence with n queries stands at absolute position seq_len − n + t. q_heads is a multiple of
        kv_heads; head h uses KV head h // (q_heads / kv_heads). Memory is linear in length. Tokens past
        query_start_loc[S] are padding: their output is undefined.
        """

    @abstractmethod
    def route_experts(
        self, logits: Array, top_k: int, normalize: bool, expert_ids: Array, expert_weights: Array
    ) -> None:
        """Softmax over all E in float32, then the top_k by weight, ties to the lowest id; divided by their sum when
        `normalize`. logits [T, E]; expert_ids int32 [T, k]; expert_weights float32 [T, k]."""

    @abstractmethod
    def grouped_linear(self, x: Array, weight: Array, expert_ids: Array, out: Array) -> None:
        """out[t, j] = x[t] · W[expert_ids[t, j]]ᵀ, tokens grouped by expert.

        x [T, K] (the same row for each of its k experts) or [T, k, K]; out [T, k, N].
        """

    @abstractmethod
    def combine_experts(self, y: Array, expert_weights: Array, out: Array) -> None:
        """out[t] = Σ_j expert_weights[t, j] · y[t, j], in order of j. y [T, k, H], out [T, H]."""

    # -- from logits to tokens ------------------------------------------------------------------------------

    @abstractmethod
    def sample(self, logits: Array, batch: SamplingBatch) -> npt.NDArray[np.int32]:
        """One token id per row [R]; `logits` float32 [R, V] are left as they were.

        Order: masks → bias → penalties → greedy exit → temperature → top_k → top_p → min_p → draw.
        z = logit / temperature in float32. top_k keeps every token with z at least the k-th largest. top_p (early
        return for p ≥ 1): float64 softmax over what is left, summed from the largest down; it keeps every token
        whose z is at least that at the first index where the sum reaches p, so ties are kept or dropped together.
        min_p keeps z ≥ max z + log(min_p), compared in float64. The draw is Gumbel-max over the survivors:
        argmax(z + g), summed in float32; g = −log(−log(u)) computed in float64 (u rounds to 1 in float32) and rounded
        to float32, u = (x + 0.5)·2⁻³² from the first word x of Philox4x32-10 with key = seed (low word, high word)
        and counter = (token id, output position, choice index, purpose 0); ties go to the lowest id. Greedy ties
        too. A row whose every token is banned, or whose raw logits hold a NaN, gives −1.
        """

    @abstractmethod
    def logprobs(self, logits: Array, token_ids: npt.NDArray[np.int32], top: int) -> LogprobsResult:
        """Log-softmax of raw logits float32 [R, V] at `token_ids` [R], and the `top` most likely of each row (all V if
        there are no more). A row that holds a NaN has the logprob NaN; its rank and list are undefined."""

    # -- steps ----------------------------------------------------------------------------------------------

    def run(self, shape_class: Hashable, forward: Callable[[], None]) -> None:
        """Run `forward`, a fixed sequence of operations on fixed buffers for this shape class (only the buffers'
        contents differ between calls). A backend may record it once and replay it. The index arrays of the step
        (positions, slots, block tables, lengths) do not change within: what follows from them may be kept."""
        forward()

    def run_timed(self, shape_class: Hashable, forward: Callable[[], None]) -> list[OperationTime]:
        """As run(), waiting for each operation: slower. How long each took; [] where that cannot be told of this call
        (a backend that has to record the shape class first)."""
        times: list[OperationTime] = []
        started = begin = time.perf_counter()

        def begun(name: str) -> None:
            nonlocal begin
            self.range_begun(name)
            begin = time.perf_counter()

        def ended(name: str) -> None:
            self.synchronize()
            self.range_ended()
            times.append(OperationTime(name, begin - started, time.perf_counter() - started))

        with watched(self, begun, ended):
            self.run(shape_class, forward)
        return times

    def range_begun(self, name: str) -> None:
        """Mark the begin of a range for the profiler of the device (NVTX), where there is one; ranges nest."""

    def range_ended(self) -> None:
        """The end of the latest one."""

    def synchronize(self) -> None:
        """Wait until all operations so far are done."""

    def close(self) -> None:
        """Stop threads, release memory."""
