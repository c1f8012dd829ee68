"""Mixtral: Mistral with experts in every layer. Its GGUF files name the Llama architecture."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.models.architecture import Architecture
from engine.models.config import ModelConfig, MoEConfig
from engine.models.hf_config import HFConfig
from engine.models.hf_defaults import HF_NAMES, from_hf

_EXPERT: Final = "{prefix}layers.{layer}.block_sparse_moe.experts.{expert}."
_STEMS: Final = {
    "router": "{prefix}layers.{layer}.block_sparse_moe.gate",
    "expert_gate": f"{_EXPERT}w1",
    "expert_up": f"{_EXPERT}w3",
    "expert_down": f"{_EXPERT}w2",
}


def _from_hf(hf: HFConfig) -> ModelConfig:
    config = from_hf(hf)
    moe = MoEConfig(
        num_experts=hf.require("num_local_experts", int),
        num_experts_per_token=hf.require("num_experts_per_tok", int),
        intermediate_size=config.intermediate_size,
        normalize=True,
    )
    return replace(config, moe=moe, layers=tuple(replace(layer, sparse=True) for layer in config.layers))


MIXTRAL: Final = Architecture(
    name="Mixtral",
    hf_classes=("MixtralForCausalLM",),
    hf_types=("mixtral",),
    config_from_hf=_from_hf,
    hf_names=HF_NAMES.with_stems(_STEMS),
)
