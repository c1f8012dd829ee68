"""The usual metadata of GGUF files, the usual names of their tensors.

A family's file starts from these and states its differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeVar

from engine.errors import ModelError
from engine.models.architecture import WeightNames
from engine.models.config import LayerConfig, ModelConfig, MoEConfig
from engine.models.config_check import layer_count
from engine.models.gguf_file import GGUFFile
from engine.models.hf_rope import longrope_attention_factor
from engine.models.rope import (
    DivisorScaling,
    LinearScaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)

GGUF_STEMS: Final = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attention_norm": "blk.{layer}.attn_norm",
    "q": "blk.{layer}.attn_q",
    "k": "blk.{layer}.attn_k",
    "v": "blk.{layer}.attn_v",
    "q_norm": "blk.{layer}.attn_q_norm",
    "k_norm": "blk.{layer}.attn_k_norm",
    "o": "blk.{layer}.attn_output",
    "mlp_norm": "blk.{layer}.ffn_norm",
    "gate": "blk.{layer}.ffn_gate",
    "up": "blk.{layer}.ffn_up",
    "down": "blk.{layer}.ffn_down",
    "router": "blk.{layer}.ffn_gate_inp",
    "expert_gate": "blk.{layer}.ffn_gate_exps",
    "expert_up": "blk.{layer}.ffn_up_exps",
    "expert_down": "blk.{layer}.ffn_down_exps",
    "shared_gate": "blk.{layer}.ffn_gate_shexp",
    "shared_up": "blk.{layer}.ffn_up_shexp",
    "shared_down": "blk.{layer}.ffn_down_shexp",
    "shared_router": "blk.{layer}.ffn_gate_inp_shexp",
}
GGUF_IGNORED: Final = (r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight")  # read with the configuration
GGUF_NAMES: Final = WeightNames(GGUF_STEMS, ignored=GGUF_IGNORED)

_SOFTMAX: Final = 1  # of the values of expert_gating_func
_Kind = TypeVar("_Kind", bool, int, float, str)


class GGUFKeys:
    """The metadata keys of the file's own architecture: `keys.get("block_count", …)` reads its block_count."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self.architecture = gguf.require("general.architecture", str)

    def get(self, key: str, kind: type[_Kind], default: _Kind) -> _Kind:
        return self.gguf.get(f"{self.architecture}.{key}", kind, default)

    def require(self, key: str, kind: type[_Kind]) -> _Kind:
        return self.gguf.require(f"{self.architecture}.{key}", kind)


def from_gguf(gguf: GGUFFile, rotated: bool = True, windowed: Callable[[int], bool] | None = None) -> ModelConfig:
    """The configuration of the usual model. Biases are where the file has them, a layer is sparse where it has a
    router. `rotated`: whether RoPE turns queries and keys. `windowed` says which layers slide where the file has a
    window and no pattern (default: all)."""
    keys = GGUFKeys(gguf)
    hidden_size, num_heads = keys.require("embedding_length", int), keys.require("attention.head_count", int)
    head_dim = keys.get("attention.key_length", int, hidden_size // num_heads)
    if keys.get("attention.value_length", int, head_dim) != head_dim:
        raise ModelError(f"{gguf.path}: keys and values of different lengths are not known")
    rope = rope_from_gguf(keys, keys.get("rope.dimension_count", int, head_dim)) if rotated else None
    return ModelConfig(
        architecture=keys.architecture,
        vocab_size=_num_rows(gguf, "token_embd.weight"),
        hidden_size=hidden_size,
        intermediate_size=keys.get("feed_forward_length", int, 0),
        num_heads=num_heads,
        num_kv_heads=keys.get("attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        context_length=keys.require("context_length", int),
        layers=tuple(
            LayerConfig(rope, window, sparse=f"blk.{layer}.ffn_gate_inp.weight" in gguf.tensors)
            for layer, window in enumerate(_windows(keys, windowed))
        ),
        norm_eps=keys.get("attention.layer_norm_rms_epsilon", float, 1e-5),
        tied_head="output.weight" not in gguf.tensors,
        attention_scale=keys.get("attention.scale", float, head_dim**-0.5),
        qkv_bias="blk.0.attn_q.bias" in gguf.tensors,
        attention_output_bias="blk.0.attn_output.bias" in gguf.tensors,
        mlp_bias="blk.0.ffn_down.bias" in gguf.tensors,
        moe=moe_from_gguf(gguf),
    )


def _windows(keys: GGUFKeys, windowed: Callable[[int], bool] | None) -> list[int | None]:
    """The window of each layer. The file's pattern is a list with an entry per layer, or a number n: every n-th layer
    does not slide."""
    count = layer_count(keys.require("block_count", int), keys.gguf.path)
    window = keys.get("attention.sliding_window", int, 0) or None
    slides = [windowed is None or windowed(layer) for layer in range(count)]
    key = f"{keys.architecture}.attention.sliding_window_pattern"
    if isinstance(keys.gguf.metadata.get(key), int):
        period = keys.gguf.require(key, int)
        slides = [period == 0 or (layer + 1) % period != 0 for layer in range(count)]
    elif key in keys.gguf.metadata:
        slides = [bool(flag) for flag in keys.gguf.numbers(key)]
        if len(slides) != count:
            raise ModelError(f"{keys.gguf.path}: {key} has {len(slides)} entries for {count} layers")
    return [window if flag else None for flag in slides]


def _num_rows(gguf: GGUFFile, name: str) -> int:
    if name not in gguf.tensors:
        raise ModelError(f"{gguf.path}: tensor {name} is missing")
    return gguf.tensors[name].shape[0]


def moe_from_gguf(gguf: GGUFFile, normalize: bool = True) -> MoEConfig | None:
    """The mixture of experts, or None for a dense model. `normalize` is the family's habit, if the file is silent."""
    keys = GGUFKeys(gguf)
    num_experts = keys.get("expert_count", int, 0)
    if num_experts == 0:
        return None
    if keys.get("expert_gating_func", int, _SOFTMAX) != _SOFTMAX:
        raise ModelError(f"{gguf.path}: experts that are not chosen by a softmax are not known")
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=keys.require("expert_used_count", int),
        intermediate_size=keys.get("expert_feed_forward_length", int, keys.get("feed_forward_length", int, 0)),
        normalize=keys.get("expert_weights_norm", bool, normalize),
    )


def rope_from_gguf(keys: GGUFKeys, rotary_dim: int) -> RopeConfig:
    base = keys.get("rope.freq_base", float, 10_000.0)
    if rotary_dim % 2 or rotary_dim < 2:
        raise ModelError(f"{keys.gguf.path}: RoPE over {rotary_dim} dimensions: not an even number")
    return RopeConfig(base, rotary_dim, _scaling(keys, rotary_dim // 2))


def _scaling(keys: GGUFKeys, num_pairs: int) -> RopeScaling | None:
    gguf = keys.gguf
    if "rope_freqs.weight" in gguf.tensors:
        return DivisorScaling(_factors(gguf, "rope_freqs.weight", num_pairs))
    trained = keys.get("rope.scaling.original_context_length", int, keys.require("context_length", int))
    if "rope_factors_long.weight" in gguf.tensors:
        stretch = keys.require("context_length", int) / trained
        return LongRopeScaling(
            short_factors=_factors(gguf, "rope_factors_short.weight", num_pairs),
            long_factors=_factors(gguf, "rope_factors_long.weight", num_pairs),
            trained_positions=trained,
            attention_factor=keys.get("rope.scaling.attn_factor", float, longrope_attention_factor(stretch, trained)),
        )
    factor = keys.get("rope.scaling.factor", float, keys.get("rope.scale_linear", float, 1.0))
    kind = keys.get("rope.scaling.type", str, "linear" if factor != 1.0 else "none")
    match kind:
        case "none":
            return None
        case "linear":
            return LinearScaling(factor)
        case "yarn":
            stretch_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            return YarnScaling(
                factor=factor,
                trained_positions=trained,
                attention_factor=keys.get("rope.scaling.attn_factor", float, 1.0) * stretch_factor,
                beta_fast=keys.get("rope.scaling.yarn_beta_fast", float, 32.0),
                beta_slow=keys.get("rope.scaling.yarn_beta_slow", float, 1.0),
            )
        case _:
            raise ModelError(f"{gguf.path}: the RoPE scaling {kind!r} is not known")


def _factors(gguf: GGUFFile, name: str, count: int) -> tuple[float, ...]:
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.shape != (count,) or tensor.ggml_type.name != "F32":
        raise ModelError(f"{gguf.path}: tensor {name} should be {count} numbers of type F32")
    return tuple(tensor.data().tolist())
