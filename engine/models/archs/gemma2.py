"""Gemma 2: sandwich norms with an offset of one, scaled embeddings, GeGLU, soft caps, every other layer slides."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.models.architecture import Architecture
from engine.models.config import ModelConfig
from engine.models.gguf_defaults import GGUF_NAMES, GGUFKeys, from_gguf
from engine.models.gguf_file import GGUFFile
from engine.models.hf_config import HFConfig
from engine.models.hf_defaults import HF_NAMES, activation, from_hf
from kernels.interface import Activation

_HF_LAYER: Final = "{prefix}layers.{layer}."
SANDWICH_HF: Final = {
    "attention_post_norm": f"{_HF_LAYER}post_attention_layernorm",
    "mlp_norm": f"{_HF_LAYER}pre_feedforward_layernorm",
    "mlp_post_norm": f"{_HF_LAYER}post_feedforward_layernorm",
}
SANDWICH_GGUF: Final = {
    "attention_post_norm": "blk.{layer}.post_attention_norm",
    "mlp_post_norm": "blk.{layer}.post_ffw_norm",
}
HF_NAMES_OFFSET: Final = replace(HF_NAMES.with_stems(SANDWICH_HF), norm_offset=1.0)
GGUF_NAMES_SANDWICH: Final = GGUF_NAMES.with_stems(SANDWICH_GGUF)  # offset already added


def _from_hf(hf: HFConfig) -> ModelConfig:
    config = from_hf(hf.with_defaults({"head_dim": 256}), tied_head=True, windowed=lambda layer: layer % 2 == 0)
    bias = hf.get("attention_bias", bool, False)
    return replace(
        config,
        post_norm=True,
        qkv_bias=bias,
        attention_output_bias=bias,
        activation=activation(hf, hf.get("hidden_activation", str, "gelu_pytorch_tanh")),
        embedding_scale=config.hidden_size**0.5,
        attention_scale=hf.get("query_pre_attn_scalar", float, 256.0) ** -0.5,
        attention_soft_cap=hf.optional("attn_logit_softcapping", float),
        logit_soft_cap=hf.optional("final_logit_softcapping", float),
    )


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    keys, config = GGUFKeys(gguf), from_gguf(gguf, windowed=lambda layer: layer % 2 == 0)
    largest = len(config.layers) == 46  # the 27B model alone scales by hidden_size / num_heads, which no key says
    scale = (config.hidden_size // config.num_heads) ** -0.5 if largest else config.head_dim**-0.5
    return replace(
        config,
        post_norm=True,
        activation=Activation.GELU_TANH,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=keys.get("attention.scale", float, scale),
        attention_soft_cap=keys.get("attn_logit_softcapping", float, 50.0),
        logit_soft_cap=keys.get("final_logit_softcapping", float, 30.0),
    )


GEMMA2: Final = Architecture(
    name="Gemma 2",
    hf_classes=("Gemma2ForCausalLM",),
    hf_types=("gemma2",),
    gguf_types=("gemma2",),
    config_from_hf=_from_hf,
    config_from_gguf=_from_gguf,
    hf_names=HF_NAMES_OFFSET,
    gguf_names=GGUF_NAMES_SANDWICH,
)
