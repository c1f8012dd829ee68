"""The default model in transformers: a LlamaForCausalLM filled from the GGUF file's dequantised tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from engine.models.gguf_file import GGUFFile

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def load_default_model(path: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Llama's own reading of the file: names mapped, and the rows of q and k put back in the order before GGUF's."""
    file = GGUFFile.open(path)
    config = LlamaConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=file.require("llama.embedding_length", int),
        intermediate_size=file.require("llama.feed_forward_length", int),
        num_hidden_layers=file.require("llama.block_count", int),
        num_attention_heads=file.require("llama.attention.head_count", int),
        num_key_value_heads=file.require("llama.attention.head_count_kv", int),
        max_position_embeddings=file.require("llama.context_length", int),
        rms_norm_eps=file.require("llama.attention.layer_norm_rms_epsilon", float),
        rope_parameters={"rope_type": "default", "rope_theta": file.require("llama.rope.freq_base", float)},
        tie_word_embeddings=True,
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for name, tensor in file.tensors.items():
        values = dequantize(tensor.data(), GGMLQuantizationType(tensor.ggml_type))
        if name in _TOP_NAMES:
            weights[_TOP_NAMES[name]] = torch.from_numpy(values.copy())
            continue
        _, layer, kind, _ = name.split(".")
        if kind in heads:
            values = _unpermuted(values, heads[kind])
        weights[f"model.layers.{layer}.{_NAMES[kind]}.weight"] = torch.from_numpy(values.copy())
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) == {"lm_head.weight"}
    assert not unexpected
    return model.eval().to(dtype)


def _unpermuted(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """GGUF keeps a head's rows as pairs (i, i + D/2) side by side; Llama in transformers wants all i, then the rest."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def reference_logits(model: LlamaForCausalLM, token_ids: list[int], num_rows: int) -> torch.Tensor:
    """Logits [num_rows, V] of the last positions, in float32."""
    with torch.inference_mode():
        output = model(torch.tensor([token_ids]), logits_to_keep=num_rows, use_cache=False)
    logits: torch.Tensor = output.logits[0].float()
    return logits
