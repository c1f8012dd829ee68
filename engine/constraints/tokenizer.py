"""From a vocabulary to the tokenizer that llguidance takes."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer as Backend

from engine.constraints.vocabulary import Vocabulary


def build_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Takes a tenth of a second for 50,000 tokens. Raises ValueError if the vocabulary cannot be served."""
    if not vocabulary.eos_token_ids:
        raise ValueError("the tokenizer has no token that ends a text")
    cutter = _Cutter(vocabulary)
    tokenizer = LLTokenizer(TokenizerWrapper(cutter), eos_token=list(vocabulary.eos_token_ids))
    cutter.fallback = tokenizer
    return tokenizer


class _Cutter:
    """The tokens of a text that a grammar forces: those that the model's own tokenizer would give.

    Its names are those that llguidance asks for.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.token_bytes)
        self.special_token_ids = list(vocabulary.special_token_ids)
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.fallback: LLTokenizer | None = None
        self._backend = _mid_text_backend(vocabulary.tokenizer_json)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts only")  # llguidance tries whether bytes are taken
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        whole = b"".join([self.tokens[token_id] for token_id in token_ids])
        if self.fallback is None or whole == text.encode():
            return token_ids
        return self.fallback.greedy_tokenize(text)  # a normaliser has changed the text, which the grammar forbids


def _mid_text_backend(tokenizer_json: bytes) -> Backend:
    """The tokenizer as it cuts text in the middle of an answer: no space before it, control tokens' texts are text."""
    state = json.loads(tokenizer_json)
    state["normalizer"] = _without_prepend(state.get("normalizer"))
    pre_tokenizer = state.get("pre_tokenizer") or {}
    for step in (pre_tokenizer, *pre_tokenizer.get("pretokenizers", ())):
        if step.get("type") == "Metaspace":
            step["prepend_scheme"] = "never"
        elif "add_prefix_space" in step:
            step["add_prefix_space"] = False
    backend = Backend.from_str(json.dumps(state))
    backend.encode_special_tokens = True
    return backend


def _without_prepend(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    if normalizer is None or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] != "Sequence":
        return normalizer
    kept = [step for step in map(_without_prepend, normalizer["normalizers"]) if step is not None]
    return normalizer | {"normalizers": kept}
