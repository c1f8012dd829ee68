"""Writes a transformers model as a GGUF file, the way the community's files are laid out.

Tensor names come from the `gguf` package's own tables, so that the names in engine.models are checked against them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, RopeScalingType
from gguf.quants import quantize
from transformers import PreTrainedModel

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "gpt2": "gpt2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_INTERLEAVED = ("llama", "smollm3")
_OFFSET_NORMS = ("gemma2", "gemma3")

Floats = npt.NDArray[np.float32]


def write_gguf(model: PreTrainedModel, path: Path, quantization: str = "F32", tensors_per_part: int = 0) -> Path:
    """Linear weights and tables whose rows fit the type are quantised to it, the rest stays F32."""
    architecture = _ARCHITECTURES[model.config.model_type]
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    _write_keys(writer, model.config)
    tensors = dict(_tensors(model, architecture)) | dict(_rope_tensors(model.config, architecture))
    for name, data in tensors.items():
        kind = GGMLQuantizationType[quantization]
        if data.ndim < 2 or data.shape[-1] % 32 or name.endswith("_inp.weight"):
            kind = GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_keys(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        _write_window_pattern(writer, config)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "query_pre_attn_scalar", None):
        writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
    _write_expert_keys(writer, config)
    _write_rope_keys(writer, config)


def _write_window_pattern(writer: GGUFWriter, config: Any) -> None:
    """Only where it is not the family's habit."""
    types = getattr(config, "layer_types", None)
    if config.model_type == "gemma3_text" and config._sliding_window_pattern != 6:
        writer.add_sliding_window_pattern(config._sliding_window_pattern)
    elif types and not config.model_type.startswith("gemma"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in types])


def _write_expert_keys(writer: GGUFWriter, config: Any) -> None:
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not num_experts:
        return
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type != "mixtral":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _write_rope_keys(writer: GGUFWriter, config: Any) -> None:
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        case "longrope":
            trained = rope["original_max_position_embeddings"]
            stretch = config.max_position_embeddings / trained
            factor = rope.get("attention_factor") or np.sqrt(1 + np.log(stretch) / np.log(trained))
            writer.add_rope_scaling_orig_ctx_len(trained)
            writer.add_rope_scaling_attn_factors(float(factor))


def _rope_tensors(config: Any, architecture: str) -> Iterator[tuple[str, Floats]]:
    rope = getattr(config, "rope_parameters", None) or {}
    match rope.get("rope_type"):
        case "longrope":
            yield "rope_factors_short.weight", np.array(rope["short_factor"], np.float32)
            yield "rope_factors_long.weight", np.array(rope["long_factor"], np.float32)
        case "llama3":
            yield "rope_freqs.weight", _band_divisors(config, rope)


def _band_divisors(config: Any, rope: dict[str, Any]) -> Floats:
    head_dim = config.hidden_size // config.num_attention_heads
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, Floats]]:
    config = model.config
    arch = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for hf_name, parameter in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data: Floats = parameter.float().numpy()
        if architecture in _OFFSET_NORMS and hf_name.endswith("norm.weight"):
            data = data + 1
        if architecture == "gpt2" and hf_name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            data = data.T
        if architecture in _INTERLEAVED and ".q_proj." in hf_name:
            data = _interleaved(data, config.num_attention_heads)
        if architecture in _INTERLEAVED and ".k_proj." in hf_name:
            data = _interleaved(data, config.num_key_value_heads)
        if hf_name.endswith("shared_expert_gate.weight"):
            data = data[0]
        for part_name, part in _expert_parts(hf_name, data):
            stem, _, suffix = part_name.rpartition(".")
            yield f"{names.get_name(stem)}.{suffix}", np.ascontiguousarray(part)


def _expert_parts(name: str, data: Floats) -> Iterator[tuple[str, Floats]]:
    """transformers keeps all experts of a layer in one parameter, gate above up."""
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj").replace("block_sparse_moe", "mlp")
        gate, up = np.split(data, 2, axis=1)
        yield f"{stem}gate_proj.weight", gate
        yield f"{stem}up_proj.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{name.replace('block_sparse_moe', 'mlp')}.weight", data
    else:
        yield name, data


def _interleaved(data: Floats, heads: int) -> Floats:
    """Rows of each head from halves (0 … d/2, d/2 … d) to pairs."""
    halves = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    return halves.swapaxes(1, 2).reshape(data.shape)
