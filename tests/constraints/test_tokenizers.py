"""Every kind of tokenizer that is served can be matched by, and cuts forced text as the model was taught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.constraints.grammars import GrammarStore
from engine.constraints.tokenizer import build_tokenizer
from engine.errors import RequestRejected
from server.text.loading import load_tokenizer
from server.text.tokenizer import Tokenizer
from server.text.vocabulary import vocabulary
from tests.constraints.conftest import by_lark
from tests.text.strings import generated_strings
from tests.text.tiny import (
    BYTE_LEVEL_FAMILIES,
    ByteLevelFamily,
    byte_level_backend,
    sentencepiece_vocabulary,
    write_byte_level_gguf,
    write_gguf,
)


def check(tokenizer: Tokenizer) -> None:
    """Tokens mean the same bytes here as there; a text is cut into bytes that are the text, whatever it is."""
    matched_by = build_tokenizer(vocabulary(tokenizer, tokenizer.vocab_size + 3))
    assert matched_by.vocab_size == tokenizer.vocab_size + 3
    for token_id in range(tokenizer.vocab_size):
        spelled = tokenizer.token_bytes(token_id)
        assert matched_by.decode_bytes([token_id]) == (b"" if spelled == b"\xff" else spelled)  # no text has this byte
    for text in generated_strings(60, seed=3):
        assert matched_by.decode_bytes(matched_by.tokenize_str(text)) == text.encode()


@pytest.mark.parametrize("family", BYTE_LEVEL_FAMILIES, ids=lambda family: family.pre)
def test_byte_level(tmp_path: Path, family: ByteLevelFamily) -> None:
    path = write_byte_level_gguf(tmp_path / "model.gguf", byte_level_backend(family), pre=family.pre, eos_token_id=2)
    tokenizer = load_tokenizer(path).tokenizer
    check(tokenizer)
    matched_by = build_tokenizer(vocabulary(tokenizer, tokenizer.vocab_size))
    for text in ('{"name": "Ann"}', "one two 345\n"):
        assert matched_by.tokenize_str(text) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("space_prefix", [False, True])
def test_sentencepiece_puts_no_space_before_the_middle_of_a_text(tmp_path: Path, space_prefix: bool) -> None:
    pieces = sentencepiece_vocabulary()
    path = write_gguf(
        tmp_path / "model.gguf",
        model="llama",
        tokens=pieces.pieces,
        types=pieces.types,
        scores=pieces.scores,
        keys={"bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": space_prefix},
    )
    tokenizer = load_tokenizer(path).tokenizer
    check(tokenizer)
    matched_by = build_tokenizer(vocabulary(tokenizer, tokenizer.vocab_size))
    assert matched_by.decode_bytes(matched_by.tokenize_str("one two")) == b"one two"


def test_a_vocabulary_without_an_end_refuses_grammars(tokenizer: Tokenizer) -> None:
    store = GrammarStore()
    store.use(replace(vocabulary(tokenizer, tokenizer.vocab_size), eos_token_ids=()))
    with pytest.raises(RequestRejected, match="no token that ends a text"):
        store.compile(by_lark('start: "a"')).result()


def test_grammars_are_kept_by_their_content_while_somebody_holds_them(grammars: GrammarStore) -> None:
    held = grammars.compile(by_lark('start: "held"'))
    assert grammars.compile(by_lark('start: "held"')) is held
    others = [grammars.compile(by_lark(f'start: "{k}"')) for k in range(300)]
    assert grammars.compile(by_lark('start: "held"')) is held
    assert others[0].result() is not others[1].result()
