"""Real GGUF files: greedy tokens equal transformers' on the same, dequantised weights. Slow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.models.loader import load_model, open_model
from kernels.interface import DType
from kernels.reference.torch_kernels import TorchKernels
from tests.models.driver import Driver

NUM_OUTPUTS = 32
CONTEXT = 1024
MARGIN = 1e-3  # between the reference's two best logits: below it rounding may decide
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "水を飲むことは大切です。なぜなら",
    "Dear Sir or Madam, 🙂 I write to you because " * 3,
    "In the beginning there was a machine, and the machine counted. " * 60,  # past a window of 512
)

pytestmark = pytest.mark.slow


def _assert_greedy_equals_transformers(path: Path) -> None:
    kernels = TorchKernels(device="cpu", dtype=DType.FLOAT32, num_threads=2)
    decoder = load_model(open_model(path), kernels, CONTEXT, CONTEXT)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    driver = Driver(decoder, kernels, num_blocks=4096)
    for seq, prompt in enumerate(PROMPTS):
        tokens = tokenizer(prompt)["input_ids"]
        num_prompt_tokens = len(tokens)
        logits = driver.run(seq, tokens, chunk=200)[-1]
        for _ in range(NUM_OUTPUTS):
            tokens.append(int(logits.argmax()))
            logits = driver.run(seq, tokens[-1:])[-1]
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0, num_prompt_tokens - 1 :].numpy()
        second, best = np.partition(expected[:-1], -2, axis=-1)[:, -2:].T
        sure = best - second > MARGIN
        assert sure.mean() > 0.9
        np.testing.assert_array_equal(np.array(tokens[num_prompt_tokens:])[sure], expected[:-1].argmax(-1)[sure])
        np.testing.assert_allclose(logits, expected[-1], rtol=0, atol=1e-3)


def test_the_default_model(default_model_path: Path) -> None:
    _assert_greedy_equals_transformers(default_model_path)


def test_gemma_3(gemma_path: Path) -> None:
    _assert_greedy_equals_transformers(gemma_path)
