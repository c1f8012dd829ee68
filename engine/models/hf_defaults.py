"""What most families share: the usual fields of config.json, the usual names of tensors.

A family's file starts from these and states its differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.errors import ModelError
from engine.models.architecture import WeightNames
from engine.models.config import LayerConfig, ModelConfig
from engine.models.config_check import layer_count
from engine.models.hf_config import HFConfig
from engine.models.hf_rope import context_from_hf, rope_from_hf
from kernels.interface import Activation

HF_STEMS: Final = {
    "embedding": "{prefix}embed_tokens",
    "final_norm": "{prefix}norm",
    "head": "lm_head",
    "attention_norm": "{prefix}layers.{layer}.input_layernorm",
    "q": "{prefix}layers.{layer}.self_attn.q_proj",
    "k": "{prefix}layers.{layer}.self_attn.k_proj",
    "v": "{prefix}layers.{layer}.self_attn.v_proj",
    "q_norm": "{prefix}layers.{layer}.self_attn.q_norm",
    "k_norm": "{prefix}layers.{layer}.self_attn.k_norm",
    "o": "{prefix}layers.{layer}.self_attn.o_proj",
    "mlp_norm": "{prefix}layers.{layer}.post_attention_layernorm",
    "gate": "{prefix}layers.{layer}.mlp.gate_proj",
    "up": "{prefix}layers.{layer}.mlp.up_proj",
    "down": "{prefix}layers.{layer}.mlp.down_proj",
}
HF_PREFIXES: Final = ("model.", "")  # the second: saved without the head's class
HF_IGNORED: Final = (r".*\.rotary_emb\.inv_freq",)  # tables that older versions saved
HF_NAMES: Final = WeightNames(HF_STEMS, HF_PREFIXES, HF_IGNORED)

_ACTIVATIONS: Final = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


def from_hf(hf: HFConfig, tied_head: bool = False, windowed: Callable[[int], bool] | None = None) -> ModelConfig:
    """The configuration of the usual model. `tied_head` is the family's default; `windowed` says which layers
    slide where the file has a window and does not list the layers' types (default: all)."""
    hidden_size, num_heads = hf.require("hidden_size", int), hf.require("num_attention_heads", int)
    head_dim = hf.get("head_dim", int, hidden_size // num_heads)
    return ModelConfig(
        architecture=architecture_name(hf),
        vocab_size=hf.require("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=hf.require("intermediate_size", int),
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads", int, num_heads),
        head_dim=head_dim,
        context_length=context_from_hf(hf),
        layers=_layers_from_hf(hf, head_dim, windowed),
        norm_eps=hf.require("rms_norm_eps", float),
        tied_head=hf.get("tie_word_embeddings", bool, tied_head),
        attention_scale=head_dim**-0.5,
        activation=activation(hf, hf.get("hidden_act", str, "silu")),
    )


def architecture_name(hf: HFConfig) -> str:
    names = hf.values.get("architectures") or [hf.get("model_type", str, "")]
    return str(names[0])


def activation(hf: HFConfig, name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise ModelError(f"{hf.path}: the activation {name!r} is not known")
    return _ACTIVATIONS[name]


def _layers_from_hf(hf: HFConfig, head_dim: int, windowed: Callable[[int], bool] | None) -> tuple[LayerConfig, ...]:
    count = layer_count(hf.require("num_hidden_layers", int), hf.path)
    window = hf.optional("sliding_window", int) if hf.get("use_sliding_window", bool, True) else None
    types = hf.list_of("layer_types", str, count)
    if types is None:
        slides = [windowed is None or windowed(layer) for layer in range(count)]
        types = tuple("sliding_attention" if window and slide else "full_attention" for slide in slides)
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"{hf.path}: layers of type {', '.join(sorted(unknown))} are not known")
    ropes = {kind: rope_from_hf(hf, head_dim, kind) for kind in dict.fromkeys(types)}
    return tuple(LayerConfig(ropes[kind], window or None if kind.startswith("sliding") else None) for kind in types)
