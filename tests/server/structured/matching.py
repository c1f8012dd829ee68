"""Answers against grammars, token by token, as the engine does it."""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer

from engine.constraints.tokenizer import build_tokenizer
from server.structured.grammar import GrammarBuilder
from server.text.tokenizer import Tokenizer
from server.text.vocabulary import vocabulary
from tests.server.toy import SPECIAL, toy_tokenizer

MARKS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>")  # those of models that have them as tokens


@cache
def tokenizer() -> Tokenizer:
    return toy_tokenizer(special=(*SPECIAL, *MARKS))


@cache
def constrained_by() -> LLTokenizer:
    return build_tokenizer(vocabulary(tokenizer(), tokenizer().vocab_size))


def builder() -> GrammarBuilder:
    return GrammarBuilder(tokenizer())


def accepts(grammar: str, text: str) -> bool:
    """Whether the text is a whole answer. Control tokens of the toy's vocabulary may stand in it."""
    matcher = LLMatcher(constrained_by(), grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer().encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def begins(grammar: str, text: str) -> bool:
    """Whether an answer may begin with the text."""
    matcher = LLMatcher(constrained_by(), grammar)
    tokens = tokenizer().encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens)
