"""OLMo 2: norms after the branches instead of before; queries and keys normalised over all heads together."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.models.architecture import Architecture
from engine.models.config import ModelConfig, QKNorm
from engine.models.gguf_defaults import GGUF_NAMES, from_gguf
from engine.models.gguf_file import GGUFFile
from engine.models.hf_config import HFConfig
from engine.models.hf_defaults import HF_NAMES, from_hf

_NORMS_HF: Final = {
    "attention_post_norm": "{prefix}layers.{layer}.post_attention_layernorm",
    "mlp_post_norm": "{prefix}layers.{layer}.post_feedforward_layernorm",
}
_NORMS_GGUF: Final = {
    "attention_post_norm": "blk.{layer}.post_attention_norm",
    "mlp_post_norm": "blk.{layer}.post_ffw_norm",
}


def _from_hf(hf: HFConfig) -> ModelConfig:
    bias = hf.get("attention_bias", bool, False)
    return replace(_post_norms(from_hf(hf)), qkv_bias=bias, attention_output_bias=bias)


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    return _post_norms(from_gguf(gguf))


def _post_norms(config: ModelConfig) -> ModelConfig:
    return replace(config, pre_norm=False, post_norm=True, qk_norm=QKNorm.WHOLE)


OLMO2: Final = Architecture(
    name="OLMo 2",
    hf_classes=("Olmo2ForCausalLM",),
    hf_types=("olmo2",),
    gguf_types=("olmo2",),
    config_from_hf=_from_hf,
    config_from_gguf=_from_gguf,
    hf_names=HF_NAMES.with_stems(_NORMS_HF),
    gguf_names=GGUF_NAMES.with_stems(_NORMS_GGUF),
)
