"""Sequences side by side, windows whose blocks are given away, experts under any distribution, low precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

from engine.models.config import KVGroup
from engine.models.decoder import Decoder
from engine.models.forward_batch import ForwardBatch
from engine.models.loader import load_model, open_model
from kernels.interface import DType, KernelSet
from kernels.reference.torch_kernels import TorchKernels
from tests.models.cases import FAMILIES
from tests.models.driver import BLOCK_SIZE, Driver
from tests.models.tiny import PROMPT_LENGTH, VOCAB_SIZE, WINDOW, reference_logits, save

TOLERANCE = 1e-4
BY_NAME = {tiny.name: tiny for tiny in FAMILIES}
MIXED = ("llama", "gemma3", "mistral-window", "qwen2-moe", "gpt2", "olmo2")
LOW_PRECISION = ("llama-odd", "qwen2", "qwen3", "gemma2", "phi3", "olmo2", "gpt2")


def _load(model: PreTrainedModel, folder: Path, kernels: KernelSet) -> Decoder:
    return load_model(open_model(save(model, folder)), kernels, PROMPT_LENGTH, PROMPT_LENGTH)


def _prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, length)]


@pytest.mark.parametrize("name", MIXED)
def test_prefill_chunks_and_decodes_share_a_step(name: str, kernels: KernelSet, tmp_path: Path) -> None:
    model = BY_NAME[name].build()
    driver = Driver(_load(model, tmp_path, kernels), kernels)
    prompts = {0: _prompt(1, 40), 1: _prompt(2, 23), 2: _prompt(3, 30)}
    schedule = [
        ((0, 9),),
        ((0, 1), (1, 20)),
        ((0, 1), (1, 1), (2, 13)),
        ((2, 16), (0, 28), (1, 1)),
        ((1, 1), (0, 1), (2, 1)),
    ]
    parts: dict[int, list[npt.NDArray[np.float32]]] = {seq: [] for seq in prompts}
    done = dict.fromkeys(prompts, 0)
    for step in schedule:
        pieces = [(seq, prompts[seq][done[seq] : done[seq] + count]) for seq, count in step]
        for (seq, count), logits in zip(step, driver.step(pieces), strict=True):
            parts[seq].append(logits)
            done[seq] += count
    for seq, prompt in prompts.items():
        assert done[seq] == len(prompt)
        expected = reference_logits(model, prompt)
        np.testing.assert_allclose(np.concatenate(parts[seq]), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["mistral-window", "gemma3", "qwen2-window", "smollm3-window"])
@pytest.mark.parametrize("chunk", [1, 3, WINDOW - 1, WINDOW, WINDOW + 1])
def test_blocks_that_left_the_window_are_not_missed(name: str, chunk: int, kernels: KernelSet, tmp_path: Path) -> None:
    model = BY_NAME[name].build()
    decoder = _load(model, tmp_path, kernels)
    driver = Driver(decoder, kernels, release=True)
    prompts = [_prompt(seed, PROMPT_LENGTH) for seed in (5, 6)]
    parts: list[list[npt.NDArray[np.float32]]] = [[], []]
    for start in range(0, PROMPT_LENGTH, chunk):  # in turns, so that each overwrites what the other gave away
        for seq, prompt in enumerate(prompts):
            parts[seq] += driver.step([(seq, prompt[start : start + chunk])])
            for group, in_use in zip(decoder.kv_groups, driver.blocks_in_use(), strict=True):
                assert group.window is None or in_use <= 2 * ((WINDOW + chunk) // BLOCK_SIZE + 2)
    for prompt, logits in zip(prompts, parts, strict=True):
        np.testing.assert_allclose(np.concatenate(logits), reference_logits(model, prompt), rtol=0, atol=TOLERANCE)


def test_layers_that_see_equally_far_share_a_kv_group(kernels: KernelSet, tmp_path: Path) -> None:
    decoder = _load(BY_NAME["gemma3"].build(), tmp_path, kernels)
    assert decoder.kv_groups == (
        KVGroup(window=WINDOW, layers=(0, 1, 2, 3, 4, 6), num_kv_heads=1, head_dim=16),
        KVGroup(window=None, layers=(5,), num_kv_heads=1, head_dim=16),
    )


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_all_tokens_may_go_to_the_same_experts(name: str, kernels: KernelSet, tmp_path: Path) -> None:
    model = BY_NAME[name].build()
    decoder = _load(model, tmp_path, kernels)
    prompt = [7] * PROMPT_LENGTH  # equal tokens have equal hidden states, as attention averages equal values
    logits = Driver(decoder, kernels).run(0, prompt)
    counts = decoder.expert_counts(PROMPT_LENGTH)
    assert counts is not None
    assert [sorted(layer) for layer in counts.tolist()] == [[0, 0, 0, PROMPT_LENGTH, PROMPT_LENGTH]] * 2
    np.testing.assert_allclose(logits, reference_logits(model, prompt), rtol=0, atol=TOLERANCE)


def test_expert_counts_are_those_of_the_last_step(kernels: KernelSet, tmp_path: Path) -> None:
    tiny = BY_NAME["qwen2-moe-sparse-steps"]
    decoder = _load(tiny.build(), tmp_path, kernels)
    Driver(decoder, kernels).run(0, tiny.prompt, chunk=40)  # 40 tokens, then 24
    counts = decoder.expert_counts(24)
    assert counts is not None
    assert counts.shape == (2, 5)  # two of the four layers are sparse
    assert counts.sum(axis=1).tolist() == [48, 48]


def test_a_dense_model_counts_no_experts(kernels: KernelSet, tmp_path: Path) -> None:
    assert _load(BY_NAME["llama"].build(), tmp_path, kernels).expert_counts(0) is None


def test_a_step_larger_than_the_buffers_is_a_bug_that_is_told(kernels: KernelSet, tmp_path: Path) -> None:
    decoder = _load(BY_NAME["llama"].build(), tmp_path, kernels)
    ids = kernels.empty((PROMPT_LENGTH + 1,), DType.INT32)
    one = kernels.empty((1,), DType.INT32)
    with pytest.raises(ValueError, match="65 tokens in a step"):
        decoder.forward(ForwardBatch(ids, ids, one, one, one, groups=()))


@pytest.mark.parametrize("name", LOW_PRECISION)
def test_bfloat16_is_as_exact_as_plain_torch(name: str, tmp_path: Path) -> None:
    tiny = BY_NAME[name]
    model = tiny.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    truth = reference_logits(model, tiny.prompt)
    kernels = TorchKernels(device="cpu", dtype=DType.BFLOAT16, num_threads=1)
    actual = Driver(_load(model, tmp_path, kernels), kernels).run(0, tiny.prompt)
    for parameter in model.parameters():  # not model.to(): the rotation's angles are to stay float32
        parameter.data = parameter.data.bfloat16()
    plain = reference_logits(model, tiny.prompt)
    errors = [np.sqrt(np.mean((logits - truth) ** 2)) for logits in (actual, plain)]
    assert errors[0] <= 2 * errors[1]
