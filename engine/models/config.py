"""ModelConfig: every difference between model families, as data. The one decoder reads nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.models.rope import RopeConfig
from kernels.interface import Activation


class NormKind(StrEnum):
    RMS = "RMSNorm"
    LAYER = "LayerNorm"


class QKNorm(StrEnum):
    """RMSNorm of queries and keys before the rotation: over each head, or over all heads of a token together."""

    NONE = "none"
    PER_HEAD = "per head"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    rope: RopeConfig | None  # None: queries and keys are not rotated
    window: int | None = None  # a token sees so many tokens back, itself included; None: all
    sparse: bool = False  # a mixture of experts instead of the dense MLP


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The mixture of experts of the sparse layers."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    normalize: bool  # the chosen experts' weights are divided by their sum
    shared_intermediate_size: int = 0  # an expert that every token passes through; 0: none
    shared_gated: bool = False  # its output is multiplied by the sigmoid of a learned projection


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    A layer is  h += residual_scale · post(attention(pre(h)));  h += residual_scale · post(mlp(pre(h)))  where `pre` and
    `post` are norms, each there or not; both together are called a sandwich.
    """

    architecture: str  # for people
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int  # tokens that the files say the model takes, scalings included
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    tied_head: bool  # the output head is the embedding
    attention_scale: float  # multiplies q·k
    norm: NormKind = NormKind.RMS
    norm_bias: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True  # act(gate) · up, else act(up)
    activation: Activation = Activation.SILU
    learned_positions: int = 0  # rows of a table of position embeddings; 0: none
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    attention_soft_cap: float | None = None
    moe: MoEConfig | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values live in one cache: those that see equally far back."""

    window: int | None
    layers: tuple[int, ...]  # their indices in the model, ascending
    num_kv_heads: int
    head_dim: int


def kv_groups(config: ModelConfig) -> tuple[KVGroup, ...]:
    """The groups in the order in which the model's layers first name them."""
    windows = dict.fromkeys(layer.window for layer in config.layers)
    return tuple(
        KVGroup(
            window=window,
            layers=tuple(i for i, layer in enumerate(config.layers) if layer.window == window),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        for window in windows
    )


def num_parameters(config: ModelConfig) -> int:
    """Numbers that a checkpoint of this model holds; a tied head counts once."""
    hidden = config.hidden_size
    norm = hidden * (2 if config.norm_bias else 1)
    once = config.vocab_size * hidden * (1 if config.tied_head else 2) + config.learned_positions * hidden + norm
    per_layer = _attention_parameters(config) + norm * 2 * (config.pre_norm + config.post_norm)
    return once + sum(per_layer + _mlp_parameters(config, layer) for layer in config.layers)


def _attention_parameters(config: ModelConfig) -> int:
    qkv_size, hidden = config.q_size + 2 * config.kv_size, config.hidden_size
    biases = qkv_size * config.qkv_bias + hidden * config.attention_output_bias
    norms = {
        QKNorm.NONE: 0,
        QKNorm.PER_HEAD: 2 * config.head_dim,
        QKNorm.WHOLE: config.q_size + config.kv_size,
    }
    return (qkv_size + config.q_size) * hidden + biases + norms[config.qk_norm]


def _mlp_parameters(config: ModelConfig, layer: LayerConfig) -> int:
    hidden, num_ups = config.hidden_size, 2 if config.gated_mlp else 1

    def dense(size: int) -> int:
        return (num_ups + 1) * size * hidden + (num_ups * size + hidden) * config.mlp_bias

    moe = config.moe
    if not layer.sparse or moe is None:
        return dense(config.intermediate_size)
    experts = moe.num_experts * 3 * moe.intermediate_size * hidden
    shared = dense(moe.shared_intermediate_size) if moe.shared_intermediate_size else 0
    return moe.num_experts * hidden + experts + shared + hidden * moe.shared_gated
