"""How a tokenizer's decoder turns tokens into bytes.

A token's bytes are the same wherever it stands; only the first token of a text may lose a leading space. That
is what makes detokenising a table look-up. Decoders whose tokens depend on their neighbours (WordPiece, CTC)
are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

Piece = str | bytes
"""A token's text where its bytes are whole UTF-8 characters, else its bytes."""

_byte_token: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>").fullmatch


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that stand for bytes in byte-level BPE vocabularies (GPT-2's mapping): bytes
    that print as themselves in Latin-1, and U+0100, U+0101, … for the others in order."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printing)]
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class Leading(Enum):
    """What the first token of a text loses."""

    NOTHING = "nothing"
    ONE_SPACE = "one space"  # one space at the start of the text
    MARKS = "marks"  # every space mark of the first token


class UnknownDecoder(ValueError):
    """The decoder's kind is none of those that this module knows; the message names it."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """The piece of each token, from the serialised state of a `tokenizers` decoder."""

    byte_level: bool
    byte_fallback: bool
    replacements: tuple[tuple[str, str], ...]
    leading: Leading
    mark: str = "▁"

    @classmethod
    def of_decoder(cls, state: Mapping[str, Any]) -> Spelling:
        """Raises UnknownDecoder for a decoder of another kind."""
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True, byte_fallback=False, replacements=(), leading=Leading.NOTHING)
        replacements: list[tuple[str, str]] = []
        while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
            replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
            steps = steps[1:]
        byte_fallback = bool(steps) and steps[0]["type"] == "ByteFallback"
        rest = steps[1:] if byte_fallback else steps
        mark, leading = cls._ending(rest, kinds)
        if mark is not None:
            replacements.append((mark, " "))
        return cls(False, byte_fallback, tuple(replacements), leading, mark or "▁")

    @staticmethod
    def _ending(steps: Sequence[Mapping[str, Any]], kinds: list[str]) -> tuple[str | None, Leading]:
        """(the mark of a Metaspace step, what the text loses) of the steps after Replace and ByteFallback."""
        match [step["type"] for step in steps]:
            case ["Metaspace"]:
                keeps = steps[0].get("prepend_scheme", "always") == "never"
                return steps[0]["replacement"], Leading.NOTHING if keeps else Leading.MARKS
            case [] | ["Fuse"] if kinds:
                return None, Leading.NOTHING
            case ["Fuse", "Strip"] if (steps[1]["content"], steps[1]["start"], steps[1]["stop"]) == (" ", 1, 0):
                return None, Leading.ONE_SPACE
        raise UnknownDecoder(f"the decoder {' + '.join(kinds) or 'of no steps'} is not supported")

    def piece(self, token: str) -> Piece:
        """What a token stands for, wherever it stands but first."""
        if self.byte_level:
            if _in_alphabet(token) is not None:
                return _whole(token.translate(_BYTES_OF_ALPHABET).encode("latin-1"))
            return token
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (byte := _byte_token(token)) is not None:
            return _whole(bytes.fromhex(byte[1]))
        return token

    def first_piece(self, token: str) -> Piece:
        """What a token stands for that starts a text, apart from Leading.ONE_SPACE, which is the text's affair."""
        return self.piece(token.replace(self.mark, "") if self.leading is Leading.MARKS else token)


def spelled(piece: Piece) -> bytes:
    """A piece's bytes."""
    return piece if isinstance(piece, bytes) else piece.encode()


def _whole(spelled: bytes) -> Piece:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return spelled


_ALPHABET: Final = byte_alphabet()
_BYTES_OF_ALPHABET: Final = {ord(character): byte for character, byte in _ALPHABET.items()}
_in_alphabet: Final = re.compile("[" + re.escape("".join(_ALPHABET)) + "]*").fullmatch
