"""Qwen2-MoE: experts in all layers or every so many, and a gated expert that every token passes through."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.models.architecture import Architecture
from engine.models.config import ModelConfig, MoEConfig
from engine.models.gguf_defaults import GGUF_NAMES, GGUFKeys, from_gguf, moe_from_gguf
from engine.models.gguf_file import GGUFFile
from engine.models.hf_config import HFConfig
from engine.models.hf_defaults import HF_NAMES, from_hf

_MLP: Final = "{prefix}layers.{layer}.mlp."
_STEMS: Final = {
    "router": f"{_MLP}gate",
    "expert_gate": f"{_MLP}experts.{{expert}}.gate_proj",
    "expert_up": f"{_MLP}experts.{{expert}}.up_proj",
    "expert_down": f"{_MLP}experts.{{expert}}.down_proj",
    "shared_gate": f"{_MLP}shared_expert.gate_proj",
    "shared_up": f"{_MLP}shared_expert.up_proj",
    "shared_down": f"{_MLP}shared_expert.down_proj",
    "shared_router": f"{_MLP}shared_expert_gate",
}

HF_NAMES_MOE: Final = HF_NAMES.with_stems(_STEMS)


def with_experts(hf: HFConfig, config: ModelConfig, moe: MoEConfig) -> ModelConfig:
    step = hf.get("decoder_sparse_step", int, 1)
    dense = hf.integers("mlp_only_layers")
    layers = (
        replace(layer, sparse=index not in dense and (index + 1) % step == 0)
        for index, layer in enumerate(config.layers)
    )
    return replace(config, moe=moe, layers=tuple(layers))


def moe_from_hf(hf: HFConfig) -> MoEConfig:
    return MoEConfig(
        num_experts=hf.optional("num_experts", int) or hf.require("num_local_experts", int),
        num_experts_per_token=hf.require("num_experts_per_tok", int),
        intermediate_size=hf.require("moe_intermediate_size", int),
        normalize=hf.get("norm_topk_prob", bool, False),
    )


def _from_hf(hf: HFConfig) -> ModelConfig:
    hf = hf.with_defaults({"use_sliding_window": False})
    last = hf.get("max_window_layers", int, 28)
    config = from_hf(hf, windowed=lambda layer: layer % 2 == 0 and layer < last)
    shared_size = hf.require("shared_expert_intermediate_size", int)
    moe = replace(moe_from_hf(hf), shared_intermediate_size=shared_size, shared_gated=True)
    return replace(with_experts(hf, config, moe), qkv_bias=hf.get("qkv_bias", bool, True))


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    config, shared_size = from_gguf(gguf), GGUFKeys(gguf).require("expert_shared_feed_forward_length", int)
    moe = moe_from_gguf(gguf, normalize=False)
    moe = moe and replace(moe, shared_intermediate_size=shared_size, shared_gated=True)
    return replace(config, moe=moe)


QWEN2_MOE: Final = Architecture(
    name="Qwen2-MoE",
    hf_classes=("Qwen2MoeForCausalLM",),
    hf_types=("qwen2_moe",),
    gguf_types=("qwen2moe",),
    config_from_hf=_from_hf,
    config_from_gguf=_from_gguf,
    hf_names=HF_NAMES_MOE,
    gguf_names=GGUF_NAMES,
)
