"""GPT-2: LayerNorm, learned positions, biases everywhere, a plain MLP; weights stored (in, out)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.errors import ModelError
from engine.models.architecture import Architecture, WeightNames
from engine.models.config import LayerConfig, ModelConfig, NormKind
from engine.models.config_check import layer_count
from engine.models.gguf_defaults import GGUF_NAMES, GGUFKeys, from_gguf
from engine.models.gguf_file import GGUFFile
from engine.models.hf_config import HFConfig
from engine.models.hf_defaults import activation, architecture_name
from kernels.interface import Activation

_HF_STEMS: Final = {
    "embedding": "{prefix}wte",
    "positions": "{prefix}wpe",
    "final_norm": "{prefix}ln_f",
    "head": "lm_head",
    "attention_norm": "{prefix}h.{layer}.ln_1",
    "qkv": "{prefix}h.{layer}.attn.c_attn",
    "o": "{prefix}h.{layer}.attn.c_proj",
    "mlp_norm": "{prefix}h.{layer}.ln_2",
    "up": "{prefix}h.{layer}.mlp.c_fc",
    "down": "{prefix}h.{layer}.mlp.c_proj",
}
_GGUF_STEMS: Final = {"positions": "position_embd", "qkv": "blk.{layer}.attn_qkv"}
_MASKS: Final = r".*\.attn\.(masked_)?bias"  # constants that older versions saved


def _from_hf(hf: HFConfig) -> ModelConfig:
    if hf.get("scale_attn_by_inverse_layer_idx", bool, False) or not hf.get("scale_attn_weights", bool, True):
        raise ModelError(f"{hf.path}: attention scaled by layer, or not at all, is not known")
    hidden_size, num_heads = hf.require("n_embd", int), hf.require("n_head", int)
    head_dim = hidden_size // num_heads
    config = ModelConfig(
        architecture=architecture_name(hf),
        vocab_size=hf.require("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=hf.get("n_inner", int, 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        context_length=hf.require("n_positions", int),
        layers=(LayerConfig(rope=None),) * layer_count(hf.require("n_layer", int), hf.path),
        norm_eps=hf.get("layer_norm_epsilon", float, 1e-5),
        tied_head=hf.get("tie_word_embeddings", bool, True),
        attention_scale=head_dim**-0.5,
        activation=activation(hf, hf.get("activation_function", str, "gelu_new")),
    )
    return _common(config)


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    eps = GGUFKeys(gguf).require("attention.layer_norm_epsilon", float)
    return _common(replace(from_gguf(gguf, rotated=False), norm_eps=eps, activation=Activation.GELU_TANH))


def _common(config: ModelConfig) -> ModelConfig:
    biases = replace(config, norm_bias=True, qkv_bias=True, attention_output_bias=True, mlp_bias=True)
    return replace(biases, norm=NormKind.LAYER, gated_mlp=False, learned_positions=config.context_length)


GPT2: Final = Architecture(
    name="GPT-2",
    hf_classes=("GPT2LMHeadModel",),
    hf_types=("gpt2",),
    gguf_types=("gpt2",),
    config_from_hf=_from_hf,
    config_from_gguf=_from_gguf,
    hf_names=WeightNames(_HF_STEMS, ("transformer.", ""), (_MASKS,), transposed=True),
    gguf_names=GGUF_NAMES.with_stems(_GGUF_STEMS),
)
