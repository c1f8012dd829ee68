"""Fixtures of the runner's tests: the default model in float32, and a tiny one with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.models.decoder import Decoder
from engine.models.gguf_file import GGUFFile
from engine.models.loader import load_model, open_model
from kernels.interface import DType, KernelSet
from kernels.reference.torch_kernels import TorchKernels
from server.text.gguf_tokenizer import tokenizer_from_gguf
from server.text.tokenizer import Tokenizer
from tests.runner.tiny import tiny_decoder

MAX_BUDGET = 8192  # tokens in a step that the decoders' buffers hold


@pytest.fixture(scope="session")
def kernels() -> KernelSet:
    return TorchKernels(device="cpu", dtype=DType.FLOAT32, num_threads=1)


@pytest.fixture(scope="session")
def default_model(default_model_path: Path, kernels: KernelSet) -> Decoder:
    return load_model(open_model(default_model_path), kernels, max_model_len=8192, max_num_batched_tokens=MAX_BUDGET)


@pytest.fixture(scope="session")
def tokenizer(default_model_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile.open(default_model_path))


@pytest.fixture(scope="session")
def encode(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="session")
def tiny_model(kernels: KernelSet) -> Decoder:
    return tiny_decoder(kernels)
