"""A launch of every kernel in each configuration that matters, by the operations of the KernelSet: to compile them all.

Only types, constants and whether sizes are multiples of 16 count; contents are undefined.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kernels import formats
from kernels.interface import (
    Activation,
    AttentionSpec,
    Csr,
    CsrValues,
    DType,
    HostWeight,
    KVCacheSpec,
    Penalties,
    RopeSpec,
    SamplingBatch,
    TokenMask,
)
from kernels.triton.triton_kernels import TritonKernels

_TOKENS = 32  # as many sequences with a decode each, or half as many sequences with two queries
_HIDDEN = 512


class KernelsOnPaper(TritonKernels):
    """TritonKernels without a device: its arrays lie in the host's memory, and its kernels must not run."""

    def __init__(self, dtype: DType) -> None:
        self.activation_dtype = self.kv_dtype = dtype
        self.batch_invariant = False
        self._device = torch.device("cpu")
        self._copy_stream = None
        self._weight_bytes = 0
        self._scalars, self._step_plans = {}, None


def launch_all(kernels: KernelsOnPaper, quick: bool) -> None:
    """Every operation that has a kernel. `quick`: one configuration of each kind."""
    for head_dim, heads, window, soft_cap in _heads(quick):
        _attention(kernels, head_dim, heads, window, soft_cap)
    _tokens(kernels)
    for format in ("Q4_1", "INT4_G128") if quick else ("Q4_0", "Q4_1", "Q8_0", "INT8", *formats.INT4_GROUPS):
        _quantized(kernels, format)
    _plain(kernels)
    _sampling(kernels, vocab_size=128 if quick else 128256)


def _heads(quick: bool) -> Iterator[tuple[int, tuple[int, int], int | None, float | None]]:
    """Head size, (query heads, KV heads), window, soft cap."""
    yield 128, (32, 8), None, None
    yield 64, (9, 3), None, None
    if not quick:
        yield 64, (32, 4), 1024, None
        yield 80, (32, 32), None, None
        yield 96, (32, 8), None, None
        yield 128, (64, 8), None, 50.0
        yield 256, (4, 1), 512, None
        yield 256, (16, 8), 4096, 50.0


def _attention(
    kernels: KernelsOnPaper, head_dim: int, heads: tuple[int, int], window: int | None, soft_cap: float | None
) -> None:
    """Rotation and store, decodes and prefills, with the cache in the activations' type and in int8."""
    num_heads, num_kv_heads = heads
    q = kernels.empty((_TOKENS, num_heads, head_dim), kernels.activation_dtype)
    k, v = (kernels.empty((_TOKENS, num_kv_heads, head_dim), kernels.activation_dtype) for _ in range(2))
    positions, slots = kernels.empty((_TOKENS,), DType.INT32), kernels.empty((_TOKENS,), DType.INT64)
    table = kernels.empty((16, head_dim), DType.FLOAT32)
    spec = AttentionSpec(head_dim**-0.5, window, soft_cap)
    for kv_dtype in (kernels.activation_dtype, DType.INT8):
        cache = kernels.new_kv_cache(KVCacheSpec(1, 4, 16, num_kv_heads, head_dim, head_dim, kv_dtype))
        for rope in (RopeSpec(head_dim), RopeSpec(head_dim, interleaved=True)):
            kernels.rope_and_store_kv(q, k, v, positions, table, rope, cache, 0, slots)
        for num_seqs in (_TOKENS, _TOKENS // 2):
            for kernels.batch_invariant in (False, True):
                kernels.paged_attention(
                    q,
                    cache,
                    0,
                    kernels.empty((num_seqs, 256), DType.INT32),
                    kernels.empty((num_seqs + 1,), DType.INT32),
                    kernels.empty((num_seqs,), DType.INT32),
                    spec,
                    torch.empty_like(q),
                )
        kernels.batch_invariant = False
        kernels.copy_blocks(cache, np.array([1], np.int32), np.array([2], np.int32))


def _tokens(kernels: KernelsOnPaper) -> None:
    """What is done to each token alone."""
    x, residual, out = (kernels.empty((_TOKENS, _HIDDEN), kernels.activation_dtype) for _ in range(3))
    weight = kernels.empty((_HIDDEN,), DType.FLOAT32)
    for added in (None, residual):
        kernels.rms_norm(x, weight, 1e-5, out, added)
        kernels.layer_norm(x, weight, weight, 1e-5, out, added)
    heads = x.view(_TOKENS, 4, _HIDDEN // 4)
    kernels.rms_norm(heads, weight[: _HIDDEN // 4], 1e-5, heads)
    for activation in Activation:
        kernels.gated_activation(x, activation, out[:, : _HIDDEN // 2])
        kernels.activation(x, activation, x)
    kernels.add_gated(x, residual, kernels.empty((_TOKENS, 1), DType.FLOAT32))
    kernels.soft_cap(kernels.empty((_TOKENS, _HIDDEN), DType.FLOAT32), 30.0)
    kernels.gather_rows(x, kernels.empty((_TOKENS,), DType.INT32), out)


def _quantized(kernels: KernelsOnPaper, format: str) -> None:
    """Products with few and with more tokens, split along K and not, into both types of out; rows."""
    for columns in (_HIDDEN // 2, 8 * _HIDDEN):
        weight = kernels.pack_linear([_codes(format, 128, columns)])
        for num_tokens in (1, 16, 64):
            x = kernels.empty((num_tokens, columns), kernels.activation_dtype)
            for dtype in (kernels.activation_dtype, DType.FLOAT32):
                kernels.linear(x, weight, kernels.empty((num_tokens, 128), dtype))
    rows = kernels.empty((_TOKENS, columns), kernels.activation_dtype)
    for accumulate in (False, True):
        kernels.embedding(kernels.empty((_TOKENS,), DType.INT32), weight, rows, 2.0, accumulate)


def _codes(format: str, rows: int, columns: int) -> HostWeight:
    if format.startswith("INT"):
        return HostWeight(format, np.zeros((rows, formats.row_bytes(format, columns)), np.uint8), rows, columns)
    block_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[format]
    return HostWeight(format, np.zeros((rows, columns // 32 * block_bytes), np.uint8), rows, columns)


def _plain(kernels: KernelsOnPaper) -> None:
    """Weights in the activations' type: rows, products that do not depend on the batch, experts."""
    host = HostWeight("F32", np.zeros((128, 8 * _HIDDEN), np.float32), 128, 8 * _HIDDEN)
    weight = kernels.pack_linear([host], np.zeros(128, np.float32))
    x = kernels.empty((_TOKENS, 8 * _HIDDEN), kernels.activation_dtype)
    kernels.embedding(kernels.empty((_TOKENS,), DType.INT32), weight, x, 2.0, True)
    kernels.batch_invariant = True
    kernels.linear(x, weight, kernels.empty((_TOKENS, 128), kernels.activation_dtype))
    kernels.linear(x, weight, kernels.empty((_TOKENS, 128), DType.FLOAT32))
    odd = kernels.pack_linear([HostWeight("F32", np.zeros((3, 100), np.float32), 3, 100)])
    kernels.linear(x[:1, :100], odd, kernels.empty((1, 3), DType.FLOAT32))
    kernels.batch_invariant = False
    experts = kernels.pack_experts([[host]] * 8)
    for num_tokens in (_TOKENS, 32 * _TOKENS):
        ids = kernels.upload(np.zeros((num_tokens, 2), np.int32))
        tokens = kernels.empty((num_tokens, 8 * _HIDDEN), kernels.activation_dtype)
        kernels.grouped_linear(tokens, experts, ids, kernels.empty((num_tokens, 2, 128), kernels.activation_dtype))


def _sampling(kernels: KernelsOnPaper, vocab_size: int) -> None:
    """Greedy, plain and filtered draws, with and without edits; logprobs."""
    rows = 2
    logits = kernels.upload(np.zeros((rows, vocab_size), np.float32))
    ones, starts, ids = np.ones(rows, np.float32), np.arange(rows + 1, dtype=np.int32), np.zeros(rows, np.int32)
    for temperature, top_p, edited in ((0.0, 1.0, True), (1.0, 1.0, False), (1.0, 0.9, True)):
        kernels.sample(
            logits,
            SamplingBatch(
                temperature=ones * np.float32(temperature),
                top_k=ids,
                top_p=ones * np.float32(top_p),
                min_p=ones,
                seed=np.zeros(rows, np.uint64),
                choice_index=ids,
                output_position=ids,
                mask=TokenMask(ids, np.zeros((1, -(-vocab_size // 32)), np.uint32)) if edited else None,
                allowed=Csr(starts, ids) if edited else None,
                banned=Csr(starts, ids) if edited else None,
                bias=CsrValues(starts, ids, ones) if edited else None,
                penalties=Penalties(starts, ids, ids, ones, ones, ones) if edited else None,
            ),
        )
    for top in (0, 5):
        kernels.logprobs(logits, ids, top)
