"""Phi-3 and Phi-4-mini: q, k and v in one tensor, gate and up in another; longrope; partial rotation."""

from __future__ import annotations

from typing import Final

from engine.models.architecture import Architecture
from engine.models.gguf_defaults import GGUF_NAMES, from_gguf
from engine.models.hf_defaults import HF_NAMES, from_hf

_FUSED_HF: Final = {
    "qkv": "{prefix}layers.{layer}.self_attn.qkv_proj",
    "gate_up": "{prefix}layers.{layer}.mlp.gate_up_proj",
}
_FUSED_GGUF: Final = {"qkv": "blk.{layer}.attn_qkv", "gate_up": "blk.{layer}.ffn_up"}

PHI3: Final = Architecture(
    name="Phi-3",
    hf_classes=("Phi3ForCausalLM",),
    hf_types=("phi3",),
    gguf_types=("phi3",),
    config_from_hf=from_hf,
    config_from_gguf=from_gguf,
    hf_names=HF_NAMES.with_stems(_FUSED_HF),
    gguf_names=GGUF_NAMES.with_stems(_FUSED_GGUF),
)
