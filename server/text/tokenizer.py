"""Text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from server.text.library import is_panic
from server.text.special_tokens import FillTokens, end_token_ids, fill_tokens
from server.text.spelling import Leading, Piece, Spelling, spelled


class Tokenizer:
    """A model's tokenizer. Immutable, safe to use from several threads; encoding releases the interpreter lock.

    Raises UnknownDecoder if the backend's decoder is none that tokens can be spelled by one at a time.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        prefix_ids: Sequence[int] | None = None,
        suffix_ids: Sequence[int] | None = None,
        fill_token_ids: Mapping[str, int] | None = None,
        blank_ids: Iterable[int] = (),
    ) -> None:
        """`eos_token_ids`: those that the model's files list; well-known end-of-turn tokens are added here.
        `prefix_ids`, `suffix_ids`: what surrounds a text; None = as the backend's post-processor does it.
        `blank_ids`: tokens that stand for nothing (padding of the vocabulary). The backend is the tokenizer's own
        from here on.

        Attributes of every instance: `pieces` [vocab_size], the piece of every id, "" where there is no token, and
        `pieces_without_special`, the same with "" for special tokens; `control_ids`, by their texts, the tokens that
        a grammar takes for control tokens: special ones, and added ones in angle brackets."""
        backend.no_truncation()
        backend.no_padding()
        self._backend: Final = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids: Final = frozenset(token_id for token_id, token in added.items() if token.special)
        self.control_ids: Final[Mapping[str, int]] = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        self._spelling: Final = Spelling.of_decoder(_decoder_state(backend))
        self.pieces: Final = _pieces(backend, self._spelling, frozenset(blank_ids))
        self.pieces_without_special: Final = _without(self.pieces, self._special_ids)
        around = _surroundings(backend)
        self.prefix_ids: Final = around[0] if prefix_ids is None else tuple(prefix_ids)
        self.suffix_ids: Final = around[1] if suffix_ids is None else tuple(suffix_ids)
        self.bos_token_id: Final = bos_token_id
        ends = end_token_ids(self._special_id)
        self.eos_token_ids: Final = tuple(sorted(ends.union(eos_token_ids)))
        self.fill_tokens: Final[FillTokens | None] = fill_tokens(backend.token_to_id, fill_token_ids or {})

    def _special_id(self, text: str) -> int | None:
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    # Encoding

    @property
    def adds_bos(self) -> bool:
        """Whether `encode` with special tokens puts BOS before the text."""
        return self.bos_token_id is not None and self.bos_token_id in self.prefix_ids

    def encode(self, text: str, add_special_tokens: bool, parse_special: bool = True) -> list[int]:
        """The token ids of a text; may be empty.

        `add_special_tokens` puts the tokenizer's prefix (usually BOS) before it, unless the text already begins
        with that, and its suffix, if any, after it. Without `parse_special`, control tokens that stand in the text
        are plain text. Raises ValueError if the text is no Unicode (half of a surrogate pair), or if it has millions
        of equal characters in a row, which the splitting patterns give up on.
        """
        return self.encode_batch([text], add_special_tokens, parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, parse_special: bool = True
    ) -> list[list[int]]:
        """`encode` for each text, on all cores."""
        backend = self._backend if parse_special else self._plain_backend
        try:
            # Unlike encode(), the batch call gives the interpreter lock away; the fast one omits offsets.
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise ValueError("the text holds half of a surrogate pair, which is no valid Unicode") from None
        except BaseException as error:
            if is_panic(error):
                raise ValueError(f"the text cannot be split into tokens: {error}") from error
            raise
        batch = [encoding.ids for encoding in encodings]
        return [self._surround(ids) for ids in batch] if add_special_tokens else batch

    def _surround(self, ids: list[int]) -> list[int]:
        prefix, suffix = list(self.prefix_ids), list(self.suffix_ids)
        if ids[: len(prefix)] != prefix:
            ids = prefix + ids
        if suffix and ids[-len(suffix) :] != suffix:
            ids = ids + suffix
        return ids

    @cached_property
    def _plain_backend(self) -> Backend:
        """The same model and rules, with special tokens treated as text (the backend's switch for that is not
        safe to turn while another thread encodes)."""
        plain = Backend(self._backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(self._backend, part)) is not None:
                setattr(plain, part, value)
        added = self._backend.get_added_tokens_decoder()
        plain.add_tokens([added[token_id] for token_id in sorted(added)])
        if plain.get_added_tokens_decoder() != added:  # ids with gaps: only a full copy keeps them
            plain = Backend.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    # Decoding

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids, as of a whole text; bytes that are no UTF-8 become U+FFFD. Ids outside of the
        vocabulary stand for nothing."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        kept = [i for i in token_ids if 0 <= i < self.vocab_size and i not in skipped]
        if not kept:
            return ""
        whole = spelled(self.first_piece(kept[0])) + b"".join(map(self.token_bytes, kept[1:]))
        text = whole.decode("utf-8", "replace")
        return text[1:] if self.leading is Leading.ONE_SPACE and text.startswith(" ") else text

    @property
    def leading(self) -> Leading:
        """What the first token of a text loses."""
        return self._spelling.leading

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for, wherever it stands but first; they may begin or end within a
        character. b"" for ids without a token."""
        if not 0 <= token_id < len(self.pieces):
            return b""
        return spelled(self.pieces[token_id])

    def first_piece(self, token_id: int) -> Piece:
        """The piece of a token of this vocabulary that starts a text."""
        if self.leading is not Leading.MARKS:
            return self.pieces[token_id]
        token = self._backend.id_to_token(token_id)
        return "" if token is None else self._spelling.first_piece(token)

    def token_text(self, token_id: int) -> str:
        """A token as text for people; bytes that are no whole characters as escapes: \\xf0\\x9f."""
        piece = self.pieces[token_id] if 0 <= token_id < len(self.pieces) else ""
        return piece if isinstance(piece, str) else "".join(f"\\x{byte:02x}" for byte in piece)

    # The vocabulary

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token; the model's embedding may have more rows."""
        return len(self.pieces)

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token: never produced from plain text, left out of answers by default."""
        return token_id in self._special_ids

    def token_id(self, text: str) -> int | None:
        """The id of the token that the vocabulary spells like this, or None."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def serialized(self) -> bytes:
        """The tokenizer as tokenizer.json, for a constraint engine."""
        return self._backend.to_str().encode()


def _pieces(backend: Backend, spelling: Spelling, blank_ids: frozenset[int]) -> Sequence[Piece]:
    tokens = backend.get_vocab(with_added_tokens=True)
    table: list[Piece] = [""] * (max(tokens.values(), default=-1) + 1)
    for token, token_id in tokens.items():
        if token_id not in blank_ids:
            table[token_id] = spelling.piece(token)
    return table


def _without(pieces: Sequence[Piece], token_ids: frozenset[int]) -> Sequence[Piece]:
    table = list(pieces)
    for token_id in token_ids:
        table[token_id] = ""
    return table


def _decoder_state(backend: Backend) -> dict[str, Any]:
    if backend.decoder is None:
        return {"type": "Sequence", "decoders": []}
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return state


def _surroundings(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prefix, suffix) that the backend's post-processor puts around a text."""
    for probe in ("a", "1", " "):
        inner: list[int] = backend.encode(probe, add_special_tokens=False).ids
        whole: list[int] = backend.encode(probe, add_special_tokens=True).ids
        for start in range(len(whole) - len(inner) + 1) if inner else ():
            if whole[start : start + len(inner)] == inner:
                return tuple(whole[:start]), tuple(whole[start + len(inner) :])
    return (), ()
