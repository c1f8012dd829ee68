"""The configurations that the families are tested in."""

from __future__ import annotations

from typing import Any

from tests.models.tiny import EVEN, FULL, ODD, TRAINED_LENGTH, WINDOW, TinyModel

_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_QWEN2_MOE = EVEN | _MOE | {"shared_expert_intermediate_size": 28}
_QWEN3_MOE = EVEN | _MOE | {"head_dim": 16}
_GEMMA = ODD | {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": WINDOW}
_WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW}
_TIED = {"tie_word_embeddings": True}
_GPT2 = {"n_embd": 35, "n_head": 5, "n_layer": 2, "max_position_embeddings": 64}


def _rope(rope_type: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **options}}


_LONG_FACTORS = {
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.0, 4.0, 7.0],
}

FAMILIES: tuple[TinyModel, ...] = (
    TinyModel("llama", "llama", EVEN),
    TinyModel("llama-odd", "llama", ODD | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    TinyModel("llama-full", "llama", FULL),
    TinyModel("llama-head-dim", "llama", EVEN | {"head_dim": 10}),
    TinyModel("llama-biases", "llama", EVEN | {"attention_bias": True, "mlp_bias": True}),
    TinyModel("smollm3", "smollm3", EVEN | {"num_hidden_layers": 5}),
    TinyModel(
        "smollm3-window",
        "smollm3",
        ODD | {"num_hidden_layers": 4, "no_rope_layer_interval": 2, **_WINDOWED},
        in_gguf=False,
    ),
    TinyModel("mistral-window", "mistral", EVEN | {"sliding_window": WINDOW}),
    TinyModel("mistral", "mistral", ODD | {"sliding_window": None, "head_dim": 16}),
    TinyModel("qwen2", "qwen2", EVEN),
    TinyModel(
        "qwen2-window",
        "qwen2",
        FULL | {**_WINDOWED, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    TinyModel("qwen3", "qwen3", EVEN | {"head_dim": 16}),
    TinyModel("qwen3-odd", "qwen3", ODD | {"head_dim": 14, "tie_word_embeddings": True, "attention_bias": True}),
    TinyModel("gemma2", "gemma2", _GEMMA | {"num_hidden_layers": 3}),
    TinyModel(
        "gemma2-caps",
        "gemma2",
        _GEMMA | EVEN | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    TinyModel("gemma3", "gemma3_text", _GEMMA | {"num_hidden_layers": 7}),
    TinyModel("gemma3-even", "gemma3_text", _GEMMA | EVEN | {"num_hidden_layers": 4, "sliding_window_pattern": 2}),
    TinyModel("phi3", "phi3", EVEN),
    TinyModel("phi3-window", "phi3", ODD | {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    TinyModel(
        "phi3-partial",
        "phi3",
        {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5, "partial_rotary_factor": 0.75},
    ),
    TinyModel("olmo2", "olmo2", EVEN),
    TinyModel("olmo2-odd", "olmo2", ODD | {"attention_bias": True}),
    TinyModel("gpt2", "gpt2", _GPT2),
    TinyModel("gpt2-wide", "gpt2", _GPT2 | {"n_inner": 44, "n_layer": 3, "tie_word_embeddings": False}),
    TinyModel("mixtral", "mixtral", EVEN | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    TinyModel(
        "mixtral-one", "mixtral", ODD | {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": WINDOW}
    ),
    TinyModel("qwen2-moe", "qwen2_moe", _QWEN2_MOE),
    TinyModel(
        "qwen2-moe-sparse-steps",
        "qwen2_moe",
        _QWEN2_MOE
        | ODD
        | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
        in_gguf=False,
    ),
    TinyModel("qwen3-moe", "qwen3_moe", _QWEN3_MOE | {"norm_topk_prob": True}),
    TinyModel(
        "qwen3-moe-dense-layers",
        "qwen3_moe",
        _QWEN3_MOE | ODD | {"num_hidden_layers": 3, "mlp_only_layers": [1]},
        in_gguf=False,
    ),
)

SCALINGS: tuple[TinyModel, ...] = (
    TinyModel("linear", "llama", EVEN | _rope("linear", factor=3.0)),
    TinyModel("dynamic", "llama", EVEN | _rope("dynamic", factor=2.0), in_gguf=False),
    TinyModel(
        "llama3",
        "llama",
        EVEN
        | _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24),
    ),
    TinyModel("yarn", "llama", EVEN | _rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    TinyModel(
        "yarn-options",
        "llama",
        FULL
        | {"head_dim": 32}
        | _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.8,
            mscale_all_dim=0.5,
            truncate=False,
        ),
        in_gguf=False,
    ),
    TinyModel("longrope", "phi3", EVEN | _rope("longrope", **_LONG_FACTORS) | {"original_max_position_embeddings": 32}),
    TinyModel(
        "longrope-short",
        "phi3",
        EVEN | _rope("longrope", **_LONG_FACTORS) | {"original_max_position_embeddings": 32},
        prompt_length=32,
    ),
    TinyModel(
        "longrope-partial",
        "phi3",
        EVEN
        | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": TRAINED_LENGTH // 2}
        | _rope("longrope", short_factor=[1.0, 1.2, 1.5], long_factor=[2.0, 3.0, 5.0], attention_factor=1.25),
    ),
    TinyModel(
        "gemma3-linear",
        "gemma3_text",
        _GEMMA
        | {
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
)
