"""Qwen3-MoE: Qwen2-MoE with q/k norms and without the shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.models.architecture import Architecture
from engine.models.archs.qwen2_moe import HF_NAMES_MOE, moe_from_hf, with_experts
from engine.models.config import ModelConfig, QKNorm
from engine.models.gguf_defaults import GGUF_NAMES, from_gguf
from engine.models.gguf_file import GGUFFile
from engine.models.hf_config import HFConfig
from engine.models.hf_defaults import from_hf


def _from_hf(hf: HFConfig) -> ModelConfig:
    config = from_hf(hf.with_defaults({"use_sliding_window": False, "head_dim": 128}))
    bias = hf.get("attention_bias", bool, False)
    config = replace(config, qk_norm=QKNorm.PER_HEAD, qkv_bias=bias, attention_output_bias=bias)
    return with_experts(hf, config, moe_from_hf(hf))


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    return replace(from_gguf(gguf), qk_norm=QKNorm.PER_HEAD)


QWEN3_MOE: Final = Architecture(
    name="Qwen3-MoE",
    hf_classes=("Qwen3MoeForCausalLM",),
    hf_types=("qwen3_moe",),
    gguf_types=("qwen3moe",),
    config_from_hf=_from_hf,
    config_from_gguf=_from_gguf,
    hf_names=HF_NAMES_MOE,
    gguf_names=GGUF_NAMES,
)
