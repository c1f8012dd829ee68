"""Qwen3: queries and keys are normalised per head."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.models.architecture import Architecture
from engine.models.archs.qwen2 import windowed_from_hf
from engine.models.config import ModelConfig, QKNorm
from engine.models.gguf_defaults import GGUF_NAMES, from_gguf
from engine.models.gguf_file import GGUFFile
from engine.models.hf_config import HFConfig
from engine.models.hf_defaults import HF_NAMES


def _from_hf(hf: HFConfig) -> ModelConfig:
    bias = hf.get("attention_bias", bool, False)
    config = windowed_from_hf(hf.with_defaults({"head_dim": 128}))
    return replace(config, qk_norm=QKNorm.PER_HEAD, qkv_bias=bias, attention_output_bias=bias)


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    return replace(from_gguf(gguf), qk_norm=QKNorm.PER_HEAD)


QWEN3: Final = Architecture(
    name="Qwen3",
    hf_classes=("Qwen3ForCausalLM",),
    hf_types=("qwen3",),
    gguf_types=("qwen3",),
    config_from_hf=_from_hf,
    config_from_gguf=_from_gguf,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
)
