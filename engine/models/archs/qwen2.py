"""Qwen2 and 2.5: biases on q, k and v; windows, where there are any, from layer max_window_layers on."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.models.architecture import Architecture
from engine.models.config import ModelConfig
from engine.models.gguf_defaults import GGUF_NAMES, from_gguf
from engine.models.gguf_file import GGUFFile
from engine.models.hf_config import HFConfig
from engine.models.hf_defaults import HF_NAMES, from_hf


def windowed_from_hf(hf: HFConfig) -> ModelConfig:
    """The usual configuration; `use_sliding_window` is off by default and the first layers never slide."""
    first = hf.get("max_window_layers", int, 28)
    return from_hf(hf.with_defaults({"use_sliding_window": False}), windowed=lambda layer: layer >= first)


def _from_hf(hf: HFConfig) -> ModelConfig:
    return replace(windowed_from_hf(hf), qkv_bias=True)


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    return replace(from_gguf(gguf), qkv_bias=True)


QWEN2: Final = Architecture(
    name="Qwen2",
    hf_classes=("Qwen2ForCausalLM",),
    hf_types=("qwen2",),
    gguf_types=("qwen2",),
    config_from_hf=_from_hf,
    config_from_gguf=_from_gguf,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
)
