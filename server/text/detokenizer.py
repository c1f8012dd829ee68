"""Token ids to text, one by one."""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Final

from server.text.spelling import Leading, Piece, spelled
from server.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one choice, as its tokens arrive.

    What `push` and, at the end, `flush` return adds up to the tokenizer's `decode` of all the tokens. No text ends
    within a character: its bytes wait until the character is whole. Bytes that can be no part of a character come
    out as U+FFFD as soon as that is certain.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, starts_text: bool) -> None:
        """`starts_text`: the tokens begin a text of their own, whose first token may lose its leading space; False
        for tokens that continue a prompt's text."""
        self._tokenizer: Final = tokenizer
        self._pieces: Final = tokenizer.pieces_without_special if skip_special_tokens else tokenizer.pieces
        self._num_pieces: Final = len(self._pieces)
        self._skips_special: Final = skip_special_tokens
        self._leading = tokenizer.leading if starts_text else Leading.NOTHING
        self._pending = b""  # the first bytes of a character

    @property
    def pending(self) -> bool:
        """Whether a character has begun and is not yet whole."""
        return bool(self._pending)

    def push(self, token_id: int) -> str:
        """The text that this token completes; often its own, "" while a character is incomplete."""
        piece = self._piece(token_id)
        if self._leading is not Leading.NOTHING:
            return self._push_first(token_id, piece)
        if self._pending or isinstance(piece, bytes):
            return self._join(piece)
        return piece

    def starts_at(self, token_id: int) -> int:
        """How many characters `push` of this token would complete before the one that the token begins in: 1 if
        the pending bytes will turn out to be no character, else 0."""
        if not self._pending or not (piece := self._piece(token_id)):
            return 0
        text, used = utf_8_decode(self._pending + spelled(piece)[:1], "replace", False)
        return 1 if len(text) == 2 or (text and used == len(self._pending)) else 0

    def flush(self) -> str:
        """The end of the text: U+FFFD if its last character is incomplete, else ""."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def _piece(self, token_id: int) -> Piece:
        return self._pieces[token_id] if 0 <= token_id < self._num_pieces else ""

    def _join(self, piece: Piece) -> str:
        if not piece:
            return ""
        known = self._pending + spelled(piece)
        text, used = utf_8_decode(known, "replace", False)
        self._pending = known[used:]
        return text

    def _push_first(self, token_id: int, piece: Piece) -> str:
        if self._skips_special and self._tokenizer.is_special(token_id):
            return ""
        if self._leading is Leading.MARKS:
            self._leading = Leading.NOTHING
            return self._join(self._tokenizer.first_piece(token_id))
        text = self._join(piece)
        if text:
            self._leading = Leading.NOTHING
        return text[1:] if text.startswith(" ") else text
