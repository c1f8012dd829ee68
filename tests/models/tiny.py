"""Tiny random models written by transformers: the oracle for exact logits.

Weights are drawn large enough that every part of a model moves the logits; norms and biases are random too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 96
TRAINED_LENGTH = 48
PROMPT_LENGTH = 64  # past the trained length
WINDOW = 16

EVEN = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}  # heads of 8
ODD = {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1}  # heads of 12
FULL = {"hidden_size": 42, "num_attention_heads": 7, "num_key_value_heads": 7}  # heads of 6


@dataclass(frozen=True)
class TinyModel:
    """One configuration of one family."""

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    prompt_length: int = PROMPT_LENGTH
    in_gguf: bool = True  # whether GGUF's metadata can say all of it

    def build(self) -> PreTrainedModel:
        """The model with its random weights, in float32."""
        options = {
            "vocab_size": VOCAB_SIZE,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "max_position_embeddings": TRAINED_LENGTH,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        }
        config = AutoConfig.for_model(self.model_type, **(options | self.options))
        torch.manual_seed(len(self.name))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        model.eval()
        with torch.no_grad():
            for parameter in model.parameters():
                is_vector = parameter.dim() == 1
                neutral = parameter.mean().item() if is_vector else 0.0  # of a norm: 1, or 0 where 1 is added
                parameter.normal_(neutral, 0.2 if is_vector else 0.15)
        return model

    @property
    def prompt(self) -> list[int]:
        tokens = np.random.default_rng(len(self.name)).integers(0, VOCAB_SIZE, self.prompt_length)
        return [int(token) for token in tokens]


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Logits of every position [tokens, V]."""
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


def save(model: PreTrainedModel, folder: Path, shard_bytes: int | None = None) -> Path:
    """In Hugging Face layout; in several shards when `shard_bytes` says so."""
    model.save_pretrained(folder, max_shard_size=shard_bytes or "1GB")
    return folder
