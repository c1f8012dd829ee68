"""The default model on the native kernels, and grammars in its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.constraints.grammars import GrammarStore
from engine.constraints.vocabulary import Vocabulary
from engine.models.decoder import Decoder, Workspace
from engine.models.loader import load_weights, open_model
from kernels.interface import DType, KernelSet
from kernels.select import select
from server.text.loading import load_tokenizer
from server.text.tokenizer import Tokenizer
from server.text.vocabulary import vocabulary
from tests.runner.harness import Harness

Schema = dict[str, Any]
MAX_BATCHED_TOKENS, MAX_MODEL_LEN = 1024, 2048


@pytest.fixture(scope="session")
def kernels() -> KernelSet:
    return select("cpu", DType.BFLOAT16, "auto", 2)


@pytest.fixture(scope="session")
def new_decoder(default_model_path: Path, kernels: KernelSet) -> Callable[[], Decoder]:
    """The model over the same weights: recorded steps belong to one decoder and its caches."""
    files = open_model(default_model_path)
    weights = load_weights(files, kernels, lambda done, total: None)
    workspace = Workspace(files.config, kernels, MAX_BATCHED_TOKENS)
    return lambda: Decoder(files.config, weights, kernels, workspace, MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def tokenizer(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(default_model_path).tokenizer


@pytest.fixture(scope="session")
def words(tokenizer: Tokenizer) -> Vocabulary:
    return vocabulary(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="session")
def grammars(words: Vocabulary) -> GrammarStore:
    store = GrammarStore()
    store.use(words)
    return store


@pytest.fixture(scope="session")
def make(new_decoder: Callable[[], Decoder], kernels: KernelSet, grammars: GrammarStore) -> Callable[..., Harness]:
    defaults: dict[str, Any] = {
        "grammars": grammars,
        "num_blocks": 256,
        "budget": MAX_BATCHED_TOKENS,
        "max_num_seqs": 32,
        "max_model_len": MAX_MODEL_LEN,
    }
    return lambda **options: Harness(new_decoder(), kernels, **(defaults | options))


@pytest.fixture(scope="session")
def ask(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """The prompt of a chat with this question."""
    return lambda question: tokenizer.encode(
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )


def by_schema(schema: Schema) -> str:
    """JSON of this schema, without white space."""
    return json.dumps({"grammars": [{"json_schema": schema | {"x-guidance": {"whitespace_flexible": False}}}]})


def by_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


PERSON: Schema = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "occupation": {"enum": ["doctor", "dentist", "driver"]},
        "years_of_experience": {"type": "integer", "minimum": 0, "maximum": 60},
        "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["first_name", "occupation", "years_of_experience", "favourite_colours"],
    "additionalProperties": False,
}
QUESTION = "Describe a person as JSON."
