"""The default model in float32 against transformers: the same tokens, the same logits.

Each prompt is decoded greedily by our engine; transformers then sees prompt and output in one forward pass and must
choose every token of the output itself. The margin between its two best logits is asserted, so that no rounding
decides.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.core.plan import SeqId
from engine.models.decoder import Decoder
from kernels.interface import Array, DType, SamplingBatch
from kernels.reference.torch_kernels import TorchKernels
from tests.choices import request
from tests.runner.harness import Harness
from tests.runner.oracle import load_default_model, reference_logits
from tests.runner.prompts import LONG, LONG_TOKENS, SHORT

Encode = Callable[[str], list[int]]
MIN_MARGIN = 1e-3
MAX_DIFFERENCE = 1e-3
IN_CI = ("python", "chat", "chinese", "emoji", "one token")


class RecordingKernels(TorchKernels):
    """Keeps the logits of every draw, by seed."""

    def __init__(self) -> None:
        super().__init__("cpu", DType.FLOAT32, num_threads=1)
        self.logits: dict[int, list[npt.NDArray[np.float32]]] = {}

    def sample(self, logits: Array, batch: SamplingBatch) -> npt.NDArray[np.int32]:
        for seed, row in zip(batch.seed.tolist(), logits, strict=True):
            self.logits.setdefault(seed, []).append(self.download(row))
        return super().sample(logits, batch)


@pytest.fixture(scope="module")
def oracle(default_model_path: Path) -> LlamaForCausalLM:
    torch.set_num_threads(1)
    return load_default_model(default_model_path)


def compare(prompts: dict[str, list[int]], num_tokens: int, model: Decoder, oracle: LlamaForCausalLM) -> None:
    recorder = RecordingKernels()
    harness = Harness(model, recorder, num_blocks=800, budget=2048)
    requests = [request(i, ids, num_tokens, seed=i) for i, ids in enumerate(prompts.values())]
    outcomes = harness.run(*requests)
    for index, (name, ids) in enumerate(prompts.items()):
        ours = outcomes[SeqId(index, 0)].token_ids
        expected = reference_logits(oracle, [*ids, *ours[:-1]], num_tokens)
        best = expected.topk(2, dim=-1)
        margin = float((best.values[:, 0] - best.values[:, 1]).min())
        assert margin > MIN_MARGIN, f"{name}: rounding could decide, margin {margin:.2g}"
        assert best.indices[:, 0].tolist() == ours, name
        difference = np.abs(np.stack(recorder.logits[index]) - expected.numpy()).max()
        assert difference < MAX_DIFFERENCE, f"{name}: logits off by {difference:.2g}"


def test_a_few_prompts_give_the_tokens_and_logits_of_transformers(
    default_model: Decoder, oracle: LlamaForCausalLM, encode: Encode
) -> None:
    compare({name: encode(SHORT[name]) for name in IN_CI}, 12, default_model, oracle)


@pytest.mark.slow
def test_twenty_prompts_give_the_tokens_and_logits_of_transformers(
    default_model: Decoder, oracle: LlamaForCausalLM, encode: Encode
) -> None:
    prompts = {name: encode(text) for name, text in SHORT.items()}
    prompts["long"] = encode(LONG)[:LONG_TOKENS]
    assert len(prompts) == 20
    assert len(prompts["long"]) == LONG_TOKENS
    assert len(prompts["one token"]) == 1
    compare(prompts, 64, default_model, oracle)
