"""Masks bit by bit: a token is allowed exactly if the grammar can take it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLMatcher

from engine.constraints.grammars import GrammarStore
from engine.constraints.matching import Constraints
from engine.types import GenerationRequest
from server.text.tokenizer import Tokenizer
from tests.choices import request
from tests.constraints.conftest import PERSON, by_lark, by_schema


def record(grammar: str, outputs: Sequence[int] = (), **options: object) -> GenerationRequest:
    return request(0, (1,), 50, constraint=grammar, outputs=tuple(outputs), **options)  # type: ignore[arg-type]


def allowed(constraints: Constraints, one: GenerationRequest) -> list[int]:
    """The tokens that the next draw may give."""
    assert one.constraint is not None
    matching = constraints.begin(one, one.constraint)
    constraints.wait()
    assert matching.error is None
    bits = np.unpackbits(constraints.masks[matching.row].view(np.uint8), bitorder="little")
    constraints.end(matching)
    token_ids: list[int] = bits.nonzero()[0].tolist()
    return token_ids


@pytest.fixture
def constraints(grammars: GrammarStore, tokenizer: Tokenizer) -> Constraints:
    return Constraints(grammars, tokenizer.vocab_size, 4)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (by_schema(PERSON), '{"first_name":"Jo'),
        (by_schema(PERSON), '{"first_name":"Joanna","occupation":"d'),
        (by_lark("start: /[a-f0-9]+(é|ü|中)/"), "beef"),
        (by_lark('start: "yes" | "no" | "perhaps"'), ""),
    ],
)
def test_every_token_of_the_vocabulary(
    constraints: Constraints, grammars: GrammarStore, tokenizer: Tokenizer, grammar: str, text: str
) -> None:
    outputs = tokenizer.encode(text, add_special_tokens=False)
    matcher: LLMatcher = grammars.compile(grammar).result().beginning.deep_copy()
    assert matcher.consume_tokens(outputs)
    assert not matcher.is_accepting()
    expected = [t for t in range(tokenizer.vocab_size) if matcher.validate_tokens([t]) == 1]
    assert 1 < len(expected) < tokenizer.vocab_size
    assert allowed(constraints, record(grammar, outputs)) == expected


def test_forced_text_leaves_the_token_that_the_tokenizer_would_give(
    constraints: Constraints, tokenizer: Tokenizer
) -> None:
    """Though the text could be put together from others."""
    grammar = by_lark('start: "The quick brown fox" /[0-9]/')
    cut = tokenizer.encode("The quick brown fox", add_special_tokens=False)
    for known in range(len(cut) - 1):
        assert allowed(constraints, record(grammar, cut[:known])) == [cut[known]]


def test_the_end_is_the_requests_own(constraints: Constraints, tokenizer: Tokenizer) -> None:
    """Of a vocabulary with several end tokens those that the request stops at, and stop tokens of its own."""
    digits = by_lark("start: /[0-9]+/")
    one = tokenizer.encode("1", add_special_tokens=False)
    figures = allowed(constraints, record(digits))
    assert all(tokenizer.token_text(token_id).isdigit() for token_id in figures)
    assert allowed(constraints, record(digits, one)) == figures
    [letter] = tokenizer.encode("x", add_special_tokens=False)
    for stop in (tokenizer.eos_token_ids, tokenizer.eos_token_ids[:1], (letter,)):
        assert allowed(constraints, record(digits, stop=stop)) == figures  # not before a digit
        assert allowed(constraints, record(digits, one, stop=stop)) == sorted({*figures, *stop})


def test_rows_are_used_again(constraints: Constraints) -> None:
    for _ in range(9):
        assert len(allowed(constraints, record(by_lark('start: "a" | "b"')))) == 2


def test_control_tokens_are_meant_by_name_never_by_their_text(constraints: Constraints, tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert allowed(constraints, record(by_lark("start: <|im_end|>"))) == [end]
    assert allowed(constraints, record(by_lark(f"start: <[{end}]>"))) == [end]
    assert end not in allowed(constraints, record(by_lark('start: "<|im_end|>" | "x"')))
    assert end not in allowed(constraints, record(by_lark(r"start: /(?s:.)*x/")))
