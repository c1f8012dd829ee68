"""SmolLM3: every fourth layer does without rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.models.architecture import Architecture
from engine.models.config import ModelConfig
from engine.models.gguf_defaults import GGUF_NAMES, from_gguf
from engine.models.gguf_file import GGUFFile
from engine.models.hf_config import HFConfig
from engine.models.hf_defaults import HF_NAMES, from_hf

_INTERVAL: Final = 4


def _from_hf(hf: HFConfig) -> ModelConfig:
    config = from_hf(hf, tied_head=True)
    count = len(config.layers)
    interval = hf.get("no_rope_layer_interval", int, _INTERVAL)
    rotated = hf.list_of("no_rope_layers", int, count)  # 1: with rotation, whatever the field's name suggests
    if rotated is None:
        rotated = tuple(int((layer + 1) % interval != 0) for layer in range(count))
    bias = hf.get("attention_bias", bool, False)
    return replace(
        _without_rotation(config, rotated),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=hf.get("mlp_bias", bool, False),
    )


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    config = from_gguf(gguf)
    return _without_rotation(config, tuple(int((layer + 1) % _INTERVAL != 0) for layer in range(len(config.layers))))


def _without_rotation(config: ModelConfig, rotated: tuple[int, ...]) -> ModelConfig:
    layers = zip(config.layers, rotated, strict=True)
    return replace(config, layers=tuple(layer if turns else replace(layer, rope=None) for layer, turns in layers))


SMOLLM3: Final = Architecture(
    name="SmolLM3",
    hf_classes=("SmolLM3ForCausalLM",),
    hf_types=("smollm3",),
    gguf_types=("smollm3",),
    config_from_hf=_from_hf,
    config_from_gguf=_from_gguf,
    hf_names=HF_NAMES,
    gguf_names=replace(GGUF_NAMES, interleaved_rope=True),
)
