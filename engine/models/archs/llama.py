"""Llama 2, 3, 3.x and those that share its files: SmolLM2, and in GGUF Mistral and Mixtral too."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.models.architecture import Architecture
from engine.models.config import ModelConfig
from engine.models.gguf_defaults import GGUF_NAMES, from_gguf
from engine.models.hf_config import HFConfig
from engine.models.hf_defaults import HF_NAMES, from_hf


def _from_hf(hf: HFConfig) -> ModelConfig:
    bias = hf.get("attention_bias", bool, False)
    return replace(from_hf(hf), qkv_bias=bias, attention_output_bias=bias, mlp_bias=hf.get("mlp_bias", bool, False))


LLAMA: Final = Architecture(
    name="Llama",
    hf_classes=("LlamaForCausalLM",),
    hf_types=("llama",),
    gguf_types=("llama",),
    config_from_hf=_from_hf,
    config_from_gguf=from_gguf,
    hf_names=HF_NAMES,
    gguf_names=replace(GGUF_NAMES, interleaved_rope=True),
)
