"""The decoder's weights, packed by the kernels: what is read, in which order, with which shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.models.checkpoint import Weights
from engine.models.config import ModelConfig, MoEConfig, NormKind, QKNorm
from kernels.interface import Array, HostWeight


@dataclass(frozen=True, slots=True)
class NormWeights:
    weight: Array  # [H]
    bias: Array | None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    qkv: Array  # linear: q above k above v
    q_norm: Array | None
    k_norm: Array | None
    o: Array


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """An MLP; `up` is gate above up when the MLP is gated."""

    up: Array
    down: Array
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    router: Array
    up: Array  # per expert: gate above up
    down: Array
    shared: DenseWeights | None
    shared_router: Array | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: NormWeights | None
    attention: AttentionWeights
    attention_post_norm: NormWeights | None
    mlp_norm: NormWeights | None
    mlp: DenseWeights | ExpertWeights
    mlp_post_norm: NormWeights | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Array
    positions: Array | None
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights
    head: Array


class Packer(Protocol):
    """The part of KernelSet that takes weights."""

    def pack_linear(self, parts: Sequence[HostWeight], bias: npt.NDArray[np.float32] | None = None) -> Array: ...
    def pack_experts(self, experts: Sequence[Sequence[HostWeight]]) -> Array: ...
    def pack_vector(self, host: npt.NDArray[np.float32]) -> Array: ...


class WeightPacker:
    """Reads in the order of the layers, so that one tensor group at a time is on the host."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Packer) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels

    def pack(self) -> DecoderWeights:
        """Raises ModelError if the weights are not exactly those of the configuration."""
        config, kernels = self._config, self._kernels
        table = config.vocab_size, config.hidden_size
        embedding = kernels.pack_linear([self._weights.matrix("embedding", *table)])
        positions = None
        if config.learned_positions:
            rows = self._weights.matrix("positions", config.learned_positions, config.hidden_size)
            positions = kernels.pack_linear([rows])
        layers = tuple(self._layer(layer) for layer in range(len(config.layers)))
        final_norm = self._norm("final_norm", 0)
        head = embedding if config.tied_head else kernels.pack_linear([self._weights.matrix("head", *table)])
        self._weights.finish()
        return DecoderWeights(embedding, positions, layers, final_norm, head)

    def _layer(self, layer: int) -> LayerWeights:
        config = self._config
        sparse = config.moe if config.layers[layer].sparse else None
        return LayerWeights(
            attention_norm=self._norm("attention_norm", layer) if config.pre_norm else None,
            attention=self._attention(layer),
            attention_post_norm=self._norm("attention_post_norm", layer) if config.post_norm else None,
            mlp_norm=self._norm("mlp_norm", layer) if config.pre_norm else None,
            mlp=self._experts(layer, sparse) if sparse else self._dense(layer, "", config.intermediate_size),
            mlp_post_norm=self._norm("mlp_post_norm", layer) if config.post_norm else None,
        )

    def _norm(self, name: str, layer: int) -> NormWeights:
        size = self._config.hidden_size
        weight = self._kernels.pack_vector(self._weights.vector(name, size, layer))
        has_bias = self._config.norm is NormKind.LAYER and self._config.norm_bias
        bias = self._kernels.pack_vector(self._weights.bias(name, size, layer)) if has_bias else None
        return NormWeights(weight, bias)

    def _attention(self, layer: int) -> AttentionWeights:
        config, weights, kernels = self._config, self._weights, self._kernels
        if weights.has("qkv"):
            parts = {"qkv": (config.q_size + 2 * config.kv_size, 0)}
        else:
            turned = config.layers[layer].rope is not None
            parts = {
                "q": (config.q_size, config.num_heads if turned else 0),
                "k": (config.kv_size, config.num_kv_heads if turned else 0),
                "v": (config.kv_size, 0),
            }
        q_norm = k_norm = None
        if config.qk_norm is not QKNorm.NONE:
            per_head = config.qk_norm is QKNorm.PER_HEAD
            q_norm = kernels.pack_vector(
                weights.vector("q_norm", config.head_dim if per_head else config.q_size, layer)
            )
            k_norm = kernels.pack_vector(
                weights.vector("k_norm", config.head_dim if per_head else config.kv_size, layer)
            )
        return AttentionWeights(
            qkv=self._linear(parts, config.hidden_size, layer, config.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            o=self._linear({"o": (config.hidden_size, 0)}, config.q_size, layer, config.attention_output_bias),
        )

    def _dense(self, layer: int, prefix: str, size: int) -> DenseWeights:
        hidden_size, bias = self._config.hidden_size, self._config.mlp_bias
        if not self._config.gated_mlp:
            parts = {f"{prefix}up": (size, 0)}
        elif self._weights.has(f"{prefix}gate_up"):
            parts = {f"{prefix}gate_up": (2 * size, 0)}
        else:
            parts = {f"{prefix}gate": (size, 0), f"{prefix}up": (size, 0)}
        return DenseWeights(
            up=self._linear(parts, hidden_size, layer, bias),
            down=self._linear({f"{prefix}down": (hidden_size, 0)}, size, layer, bias),
            intermediate_size=size,
        )

    def _linear(self, parts: dict[str, tuple[int, int]], columns: int, layer: int, has_bias: bool) -> Array:
        """`parts`: name → (rows, heads that RoPE turns)."""
        weights = self._weights
        stacked = [weights.matrix(name, rows, columns, layer, heads) for name, (rows, heads) in parts.items()]
        if not has_bias:
            return self._kernels.pack_linear(stacked)
        biases = [weights.bias(name, rows, layer, heads) for name, (rows, heads) in parts.items()]
        return self._kernels.pack_linear(stacked, np.concatenate(biases))

    def _experts(self, layer: int, moe: MoEConfig) -> ExpertWeights:
        hidden_size, size = self._config.hidden_size, moe.intermediate_size
        names = {"expert_gate_up": 2 * size}
        if not self._weights.has("expert_gate_up"):
            names = {"expert_gate": size, "expert_up": size}
        parts = [self._weights.experts(name, moe.num_experts, rows, hidden_size, layer) for name, rows in names.items()]
        down: list[HostWeight] = self._weights.experts("expert_down", moe.num_experts, hidden_size, size, layer)
        shared = shared_router = None
        if moe.shared_intermediate_size:
            shared = self._dense(layer, "shared_", moe.shared_intermediate_size)
            if moe.shared_gated:
                shared_router = self._linear({"shared_router": (1, 0)}, hidden_size, layer, has_bias=False)
        return ExpertWeights(
            router=self._linear({"router": (moe.num_experts, 0)}, hidden_size, layer, has_bias=False),
            up=self._kernels.pack_experts([list(expert) for expert in zip(*parts, strict=True)]),
            down=self._kernels.pack_experts([[weight] for weight in down]),
            shared=shared,
            shared_router=shared_router,
        )
