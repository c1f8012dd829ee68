"""Rotation tables: equal to transformers', and float32 from integer positions however far out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.models.hf_config import HFConfig
from engine.models.hf_rope import context_from_hf, rope_from_hf
from engine.models.rope import RopeConfig, attention_factor, cos_sin_table, inverse_frequencies

HEAD_DIM = 64
TRAINED = 4096
BANDS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
LONG = {
    "short_factor": [1.0 + 0.01 * pair for pair in range(HEAD_DIM // 2)],
    "long_factor": [2.0 + 0.5 * pair for pair in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 1024,
}


def _hf(rope: dict[str, Any]) -> HFConfig:
    return HFConfig(Path("config.json"), {"max_position_embeddings": TRAINED, "rope_parameters": rope})


@pytest.mark.parametrize(
    ("rope_type", "options", "served"),
    [
        ("linear", {"factor": 4.0}, TRAINED),
        ("dynamic", {"factor": 4.0}, TRAINED),
        ("dynamic", {"factor": 4.0}, 3 * TRAINED),
        ("dynamic", {"factor": 4.0}, 100),
        ("llama3", BANDS, TRAINED),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 1024}, TRAINED),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False}, TRAINED),
        ("yarn", {"factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7}, 64),
        ("yarn", {"factor": 2.0, "original_max_position_embeddings": 2048, "attention_factor": 1.5}, TRAINED),
        ("yarn", {"factor": 2.0, "original_max_position_embeddings": 8, "beta_fast": 8, "beta_slow": 2}, TRAINED),
        ("longrope", LONG, 1024),
        ("longrope", LONG, 1025),
        ("longrope", LONG | {"factor": 2.0}, 2000),
        ("longrope", LONG | {"attention_factor": 1.25}, 2000),
    ],
)
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_frequencies_equal_transformers(
    rope_type: str, options: dict[str, Any], served: int, base: float, key: str
) -> None:
    parameters = {key: rope_type, "rope_theta": base, **options}
    rope = rope_from_hf(_hf(parameters), HEAD_DIM)
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": rope_type, "rope_theta": base, **options},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=served)
    np.testing.assert_allclose(inverse_frequencies(rope, served), expected.numpy(), rtol=2e-6)
    assert attention_factor(rope.scaling) == pytest.approx(factor, rel=1e-12)


def test_a_table_is_cosines_beside_sines_of_exact_angles() -> None:
    rope = RopeConfig(base=10_000.0, rotary_dim=8)
    table = cos_sin_table(rope, 131_072)
    assert table.shape == (131_072, 8)
    assert table.dtype == np.float32
    position = 100_003  # in bfloat16 this would be 99,840
    for pair in range(4):
        angle = position * 10_000.0 ** (-2 * pair / 8)
        assert table[position, pair] == np.float32(math.cos(angle))
        assert table[position, 4 + pair] == np.float32(math.sin(angle))


def test_a_longer_table_begins_with_the_shorter_one() -> None:
    rope = rope_from_hf(_hf({"rope_type": "llama3", "rope_theta": 10_000.0, **BANDS}), HEAD_DIM)
    np.testing.assert_array_equal(cos_sin_table(rope, 300)[:100], cos_sin_table(rope, 100))


@pytest.mark.parametrize(
    ("parameters", "context"),
    [
        ({"rope_type": "default", "rope_theta": 1.0}, TRAINED),
        ({"rope_type": "linear", "factor": 4.0}, 4 * TRAINED),
        ({"type": "dynamic", "factor": 2.0}, 2 * TRAINED),
        ({"rope_type": "yarn", "factor": 4.0}, 4 * TRAINED),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, TRAINED),
        ({"rope_type": "llama3", **BANDS}, TRAINED),
        ({"rope_type": "longrope", **LONG}, TRAINED),
    ],
)
def test_the_context_counts_a_scaling_that_the_file_counts_on_top(parameters: dict[str, Any], context: int) -> None:
    assert context_from_hf(_hf(parameters)) == context
