"""Tokenizers that several tests of the text side use."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from server.text.loading import load_tokenizer
from server.text.tokenizer import Tokenizer
from tests.text.tiny import (
    BYTE_LEVEL_FAMILIES,
    byte_level_backend,
    sentencepiece_vocabulary,
    write_byte_level_gguf,
    write_gguf,
)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE; every byte has a token. <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2 are special."""
    path = tmp_path_factory.mktemp("byte_level") / "model.gguf"
    backend = byte_level_backend(BYTE_LEVEL_FAMILIES[0])
    return load_tokenizer(write_byte_level_gguf(path, backend, pre="gpt-2", eos_token_id=2)).tokenizer


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece BPE with a space prefix and byte fallback. <unk> 0, <s> 1, </s> 2 are special."""
    vocabulary = sentencepiece_vocabulary()
    path = write_gguf(
        tmp_path_factory.mktemp("sentencepiece") / "model.gguf",
        model="llama",
        tokens=vocabulary.pieces,
        types=vocabulary.types,
        scores=vocabulary.scores,
        keys={"bos_token_id": 1, "eos_token_id": 2},
    )
    return load_tokenizer(path).tokenizer


@pytest.fixture(scope="session")
def default_model_oracle(default_model_path: Path) -> PreTrainedTokenizerFast:
    """The default model's tokenizer as transformers has it."""
    oracle = AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
    # Reading GGUF, transformers omits that this model's tokenizer.json isolates digits.
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), oracle.backend_tokenizer.pre_tokenizer]
    )
    return oracle
