"""A decoder small enough for tests of everything but its numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from engine.models.checkpoint import DummyWeights
from engine.models.config import LayerConfig, ModelConfig, MoEConfig
from engine.models.decoder import Decoder, Workspace
from engine.models.rope import RopeConfig
from engine.models.weights import WeightPacker
from kernels.interface import HostWeight, KernelSet

VOCAB_SIZE = 256
HIDDEN_SIZE = 64


class LoudWeights(DummyWeights):
    """Large enough that logits differ from token to token."""

    def matrix(self, name: str, rows: int, columns: int, layer: int = 0, heads: int = 0) -> HostWeight:
        quiet = super().matrix(name, rows, columns, layer, heads)
        loud = quiet.data.astype(np.float32) * np.float32(10)
        return HostWeight("BF16", loud.astype(ml_dtypes.bfloat16), rows, columns)


def tiny_decoder(
    kernels: KernelSet, windows: tuple[int | None, ...] = (None, None), moe: MoEConfig | None = None
) -> Decoder:
    """Random weights; one layer per window. With experts, all but the first are sparse."""
    rope = RopeConfig(base=10000.0, rotary_dim=16)
    config = ModelConfig(
        architecture="tiny",
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        context_length=2048,
        layers=tuple(LayerConfig(rope, window, sparse=bool(moe and k)) for k, window in enumerate(windows)),
        norm_eps=1e-5,
        tied_head=False,
        attention_scale=0.25,
        moe=moe,
    )
    packed = WeightPacker(config, LoudWeights(seed=0), kernels).pack()
    return Decoder(config, packed, kernels, Workspace(config, kernels, num_rows=1024), max_model_len=2048)
