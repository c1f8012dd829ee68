"""What grammars need to know of a tokenizer, as the server hands it over at the handshake."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer: the bytes of its tokens, and how it cuts a text."""

    token_bytes: tuple[bytes, ...]  # one per row of the model's output head; b"" where there is no token
    special_token_ids: tuple[int, ...]  # control tokens: a grammar means them by name, never by their text
    eos_token_ids: tuple[int, ...]  # not empty; each ends an output that a grammar accepts
    tokenizer_json: bytes  # in the form of the tokenizers library
