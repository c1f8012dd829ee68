"""A tokenizer from the metadata of a GGUF file alone.

Two kinds: byte-level BPE (`tokenizer.ggml.model` = gpt2), whose merges are in the file and whose splitting of
text is named by `tokenizer.ggml.pre`; and SentencePiece BPE (= llama), whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel

from engine.errors import ModelError
from engine.models.gguf_file import GGUFFile
from server.text.library import library_errors
from server.text.pretokenizers import RULES
from server.text.sentencepiece_bpe import build_sentencepiece
from server.text.special_tokens import END_TEXTS
from server.text.tokenizer import Tokenizer

_KEY: Final = "tokenizer.ggml."
_FILL_KEYS: Final[Mapping[str, tuple[str, str]]] = {
    "prefix": ("fim_pre_token_id", "prefix_token_id"),
    "suffix": ("fim_suf_token_id", "suffix_token_id"),
    "middle": ("fim_mid_token_id", "middle_token_id"),
}

# The file does not say that an added token swallows the white space after it. Of these architectures' SentencePiece
# vocabularies all do, except for the tokens listed.
_STRIPS_RIGHT: Final[Mapping[str, frozenset[str]]] = {"phi3": frozenset({"<unk>", "<s>", "<|endoftext|>"})}


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Vocabulary:
    """The token list of a file, checked."""

    def __init__(self, file: GGUFFile) -> None:
        self.file: Final = file
        self.tokens: Final[Sequence[str]] = file.strings(f"{_KEY}tokens")
        self.ids: Final[Mapping[str, int]] = {token: index for index, token in enumerate(self.tokens)}
        if not self.tokens:
            raise ModelError(f"{file.path}: {_KEY}tokens is empty")
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise ModelError(f"{file.path}: the token {twice!r} appears twice in {_KEY}tokens")
        self.types: Final = self._types()

    def _types(self) -> list[int]:
        if f"{_KEY}token_type" not in self.file.metadata:
            named = {self.token_id(f"{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
            return [TokenType.CONTROL if i in named else TokenType.NORMAL for i in range(len(self.tokens))]
        types: list[int] = self.file.numbers(f"{_KEY}token_type").tolist()
        if len(types) != len(self.tokens):
            raise ModelError(f"{self.file.path}: {len(self.tokens)} tokens, but {len(types)} token types")
        for text in END_TEXTS:  # converters have marked some of these as ordinary added tokens
            token_id = self.ids.get(text)
            if token_id is not None and text.startswith("<|") and types[token_id] == TokenType.USER_DEFINED:
                types[token_id] = TokenType.CONTROL
        return types

    def token_id(self, key: str) -> int | None:
        """A token id under `tokenizer.ggml.`, or None. Raises ModelError if it is no id of this vocabulary."""
        token_id = self.file.get(f"{_KEY}{key}", int, -1)
        if token_id >= len(self.tokens):
            raise ModelError(f"{self.file.path}: {_KEY}{key} is {token_id}, but there are {len(self.tokens)} tokens")
        return None if token_id < 0 else token_id

    def of_type(self, *kinds: TokenType) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.types) if kind in kinds]


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Raises ModelError for a kind of tokenizer or a pre-tokenizer that is not known, and for a vocabulary that
    contradicts itself."""
    kind = file.require(f"{_KEY}model", str)
    vocabulary = _Vocabulary(file)
    with library_errors(ModelError, f"{file.path}: the tokenizer cannot be built"):
        if kind == "gpt2":
            backend, adds_bos = _byte_level(vocabulary)
        elif kind == "llama":
            backend, adds_bos = _sentencepiece(vocabulary)
        else:
            raise ModelError(f"{file.path}: the tokenizer model {kind!r} is not supported (known: gpt2, llama)")
        _add_tokens(backend, vocabulary)
        return _tokenizer(backend, vocabulary, adds_bos)


def _byte_level(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    file = vocabulary.file
    if f"{_KEY}pre" not in file.metadata:
        raise ModelError(
            f"{file.path}: {_KEY}pre is missing: the file does not say how its vocabulary splits text (files converted "
            "before May 2024 do not); convert the model again"
        )
    name = file.require(f"{_KEY}pre", str)
    rule = RULES.get(name)
    if rule is None:
        raise ModelError(f"{file.path}: the pre-tokenizer {name!r} is not known (known: {', '.join(RULES)})")
    merges = _merges(file)
    backend = Backend(models.BPE(dict(vocabulary.ids), merges, ignore_merges=rule.whole_words))
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer
    backend.pre_tokenizer = rule.pre_tokenizer
    backend.decoder = ByteLevel()
    return backend, rule.adds_bos


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    merges = []
    for index, merge in enumerate(file.strings(f"{_KEY}merges")):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ModelError(f"{file.path}: entry {index} of {_KEY}merges is no pair: {merge!r}")
        merges.append((left, right))
    return merges


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    file = vocabulary.file
    scores = file.numbers(f"{_KEY}scores")
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(f"{file.path}: {len(vocabulary.tokens)} tokens, but {len(scores)} scores")
    backend = build_sentencepiece(
        vocabulary.tokens,
        scores.tolist(),
        normal_ids=vocabulary.of_type(TokenType.NORMAL),
        user_defined_ids=vocabulary.of_type(TokenType.USER_DEFINED),
        unknown_id=0 if (declared := vocabulary.token_id("unknown_token_id")) is None else declared,
        space_prefix=file.get(f"{_KEY}add_space_prefix", bool, True),
    )
    return backend, True


def _add_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Tell the backend which tokens are found in the text before anything else."""
    keeps_right = _STRIPS_RIGHT.get(vocabulary.file.get("general.architecture", str, ""))
    if isinstance(backend.decoder, ByteLevel):
        keeps_right = None
    added = []
    for token_id in vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
        text = vocabulary.tokens[token_id]
        if backend.token_to_id(text) == token_id:
            special = vocabulary.types[token_id] != TokenType.USER_DEFINED
            strips = keeps_right is not None and text not in keeps_right
            added.append(AddedToken(text, normalized=False, special=special, rstrip=strips))
    backend.add_tokens(added)


def _tokenizer(backend: Backend, vocabulary: _Vocabulary, adds_bos: bool) -> Tokenizer:
    file = vocabulary.file
    bos, eos = vocabulary.token_id("bos_token_id"), vocabulary.token_id("eos_token_id")
    ends = [vocabulary.token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    adds_bos = file.get(f"{_KEY}add_bos_token", bool, adds_bos) and bos is not None
    adds_eos = file.get(f"{_KEY}add_eos_token", bool, False) and eos is not None
    fill_token_ids = {
        name: token_id
        for name, keys in _FILL_KEYS.items()
        for token_id in [vocabulary.token_id(key) for key in keys]
        if token_id is not None
    }
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=[token_id for token_id in ends if token_id is not None],
        prefix_ids=[bos] if adds_bos and bos is not None else [],
        suffix_ids=[eos] if adds_eos and eos is not None else [],
        fill_token_ids=fill_token_ids,
        blank_ids=vocabulary.of_type(TokenType.UNUSED),
    )
