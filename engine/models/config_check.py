"""Whether a configuration can be that of any model: what is wrong here would fail later in ways nobody understands."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from engine.errors import ModelError
from engine.models.config import ModelConfig, MoEConfig
from engine.models.rope import RopeConfig, inverse_frequencies

_MAX_LAYERS: Final = 10_000
_MAX_CHECKED_POSITIONS: Final = 1 << 20


def layer_count(count: int, path: Path) -> int:
    """`count`, unless it is so large that a tuple of so many layers would take the machine's memory."""
    if count > _MAX_LAYERS:
        raise ModelError(f"{path}: {count} layers: more than any model has")
    return count


def first_problem(config: ModelConfig) -> str | None:
    """What is wrong, or None."""
    sizes = {
        "the vocabulary": config.vocab_size,
        "the hidden size": config.hidden_size,
        "the context": config.context_length,
        "the size of a head": config.head_dim,
        "the number of layers": len(config.layers),
        "the number of heads": config.num_heads,
        "the number of KV heads": config.num_kv_heads,
        "a window": min((layer.window for layer in config.layers if layer.window is not None), default=1),
    }
    for name, size in sizes.items():
        if size < 1:
            return f"{name} is {size}"
    if config.num_heads % config.num_kv_heads:
        return f"{config.num_heads} heads cannot share {config.num_kv_heads} KV heads"
    return _mlp_problem(config) or _rope_problem(config)


def _mlp_problem(config: ModelConfig) -> str | None:
    num_sparse = sum(layer.sparse for layer in config.layers)
    if num_sparse < len(config.layers) and config.intermediate_size < 1:
        return f"the size of an MLP is {config.intermediate_size}"
    if config.moe is None:
        return "sparse layers, but no experts" if num_sparse else None
    return _moe_problem(config.moe)


def _moe_problem(moe: MoEConfig) -> str | None:
    if moe.num_experts < 1 or moe.intermediate_size < 1:
        return f"{moe.num_experts} experts of size {moe.intermediate_size}"
    if not 1 <= moe.num_experts_per_token <= moe.num_experts:
        return f"a token takes {moe.num_experts_per_token} of {moe.num_experts} experts"
    return None


def _rope_problem(config: ModelConfig) -> str | None:
    for rope in dict.fromkeys(layer.rope for layer in config.layers):
        if rope is None:
            continue
        if rope.rotary_dim > config.head_dim:
            return f"RoPE turns {rope.rotary_dim} dimensions of heads that have {config.head_dim}"
        if not _has_angles(rope, min(config.context_length, _MAX_CHECKED_POSITIONS)):
            return f"RoPE gives no finite angles: {rope}"
    return None


def _has_angles(rope: RopeConfig, num_positions: int) -> bool:
    try:
        with np.errstate(all="ignore"):
            frequencies = inverse_frequencies(rope, num_positions)
    except (ArithmeticError, TypeError, ValueError):
        return False
    return frequencies.dtype == np.float64 and bool(np.isfinite(frequencies).all())
