"""Gemma 3: Gemma 2 with q/k norms instead of soft caps, five sliding layers to one global, two RoPE bases.

Of the multimodal files the text model is served; the vision tower is left unread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.models.architecture import Architecture
from engine.models.archs.gemma2 import GGUF_NAMES_SANDWICH, HF_NAMES_OFFSET
from engine.models.config import ModelConfig, QKNorm
from engine.models.gguf_defaults import GGUFKeys, from_gguf
from engine.models.gguf_file import GGUFFile
from engine.models.hf_config import HFConfig
from engine.models.hf_defaults import activation, from_hf
from engine.models.rope import RopeConfig
from kernels.interface import Activation

_DEFAULTS: Final = {  # of the class: the multimodal files state only what differs
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def _from_hf(hf: HFConfig) -> ModelConfig:
    named = {"architectures": hf.values.get("architectures")}
    text = (hf.section("text_config") or hf).with_defaults(_DEFAULTS | named)
    period = text.get("sliding_window_pattern", int, 6)
    config = from_hf(text, tied_head=True, windowed=lambda layer: (layer + 1) % period != 0)
    ropes = text.section("rope_parameters")
    if ropes is None or "full_attention" not in ropes:  # older files: the global RoPE beside the local one's base
        config = _with_local_rope(config, RopeConfig(text.require("rope_local_base_freq", float), config.head_dim))
    return replace(
        _common(config),
        context_length=text.require("max_position_embeddings", int),  # its scaling is counted in
        activation=activation(text, text.get("hidden_activation", str, "gelu_pytorch_tanh")),
        attention_scale=text.require("query_pre_attn_scalar", float) ** -0.5,
        attention_soft_cap=text.optional("attn_logit_softcapping", float),
        logit_soft_cap=text.optional("final_logit_softcapping", float),
    )


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    keys, config = GGUFKeys(gguf), from_gguf(gguf, windowed=lambda layer: (layer + 1) % 6 != 0)
    local = RopeConfig(keys.get("rope.freq_base_swa", float, 10_000.0), config.head_dim)
    largest = len(config.layers) == 62  # the 27B model alone scales by hidden_size / num_heads, which no key says
    scale = (config.hidden_size // config.num_heads) ** -0.5 if largest else config.head_dim**-0.5
    scale = keys.get("attention.scale", float, scale)
    return replace(_common(_with_local_rope(config, local)), activation=Activation.GELU_TANH, attention_scale=scale)


def _common(config: ModelConfig) -> ModelConfig:
    return replace(config, post_norm=True, qk_norm=QKNorm.PER_HEAD, embedding_scale=config.hidden_size**0.5)


def _with_local_rope(config: ModelConfig, local: RopeConfig) -> ModelConfig:
    layers = (replace(layer, rope=local) if layer.window else layer for layer in config.layers)
    return replace(config, layers=tuple(layers))


GEMMA3: Final = Architecture(
    name="Gemma 3",
    hf_classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    hf_types=("gemma3_text", "gemma3"),
    gguf_types=("gemma3",),
    config_from_hf=_from_hf,
    config_from_gguf=_from_gguf,
    hf_names=replace(
        HF_NAMES_OFFSET,
        prefixes=("model.", "language_model.model.", "model.language_model.", ""),
        ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*", *HF_NAMES_OFFSET.ignored),
    ),
    gguf_names=GGUF_NAMES_SANDWICH,
)
