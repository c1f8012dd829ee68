"""Mistral: a window over all layers. Its GGUF files name the Llama architecture."""

from __future__ import annotations

from typing import Final

from engine.models.architecture import Architecture
from engine.models.hf_defaults import HF_NAMES, from_hf

MISTRAL: Final = Architecture(
    name="Mistral",
    hf_classes=("MistralForCausalLM",),
    hf_types=("mistral",),
    config_from_hf=from_hf,
    hf_names=HF_NAMES,
)
