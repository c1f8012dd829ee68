"""Text token by token equals the text of all tokens at once, and no character is ever cut."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from server.text.detokenizer import Detokenizer
from server.text.spelling import Spelling, UnknownDecoder, byte_alphabet, spelled
from server.text.tokenizer import Tokenizer

_IDS = st.lists(st.integers(min_value=0, max_value=1000), max_size=40)
_BYTES = st.lists(st.integers(min_value=0, max_value=255), max_size=12)


def _stream(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True, starts_text: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, starts_text=starts_text)
    return [*[detokenizer.push(token_id) for token_id in ids], detokenizer.flush()]


def _library_decode(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> str:
    text: str = Backend.from_str(tokenizer.serialized().decode()).decode(list(ids), skip_special_tokens=skip)
    return text


@pytest.fixture(scope="module")
def byte_level_library(byte_level: Tokenizer) -> Backend:
    return Backend.from_str(byte_level.serialized().decode())


@pytest.fixture(scope="module")
def sentencepiece_library(sentencepiece: Tokenizer) -> Backend:
    return Backend.from_str(sentencepiece.serialized().decode())


@settings(max_examples=400, deadline=None)
@given(ids=_IDS, skip=st.booleans())
def test_byte_level_stream_equals_decode_equals_the_library(
    byte_level: Tokenizer, byte_level_library: Backend, ids: list[int], skip: bool
) -> None:
    known = [token_id for token_id in ids if token_id < byte_level.vocab_size]
    streamed = "".join(_stream(byte_level, ids, skip=skip))
    assert streamed == byte_level.decode(ids, skip)
    assert streamed == byte_level_library.decode(known, skip_special_tokens=skip)


@settings(max_examples=400, deadline=None)
@given(parts=st.lists(st.one_of(_BYTES, st.text(max_size=4).map(lambda text: list(text.encode()))), max_size=8))
def test_byte_level_stream_of_any_bytes_equals_the_library(
    byte_level: Tokenizer, byte_level_library: Backend, parts: list[list[int]]
) -> None:
    characters = {byte: character for character, byte in byte_alphabet().items()}
    ids = [byte_level.token_id(characters[byte]) for part in parts for byte in part]
    known = [token_id for token_id in ids if token_id is not None]
    assert len(known) == len(ids)
    assert "".join(_stream(byte_level, known)) == byte_level_library.decode(known)


# Runs of byte tokens that are whole characters: of any other run the library turns every byte into U+FFFD, also those
# that were valid, which no stream could know in time.
_TEXT_BYTES = st.text(max_size=3).map(lambda text: [byte + 3 for byte in text.encode()])


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(st.one_of(_TEXT_BYTES, st.lists(st.integers(259, 700), max_size=4), st.just([1]), st.just([2]))),
    skip=st.booleans(),
)
def test_sentencepiece_stream_equals_decode_equals_the_library(
    sentencepiece: Tokenizer, sentencepiece_library: Backend, parts: list[list[int]], skip: bool
) -> None:
    ids = [token_id for part in parts for token_id in part if token_id < sentencepiece.vocab_size]
    streamed = "".join(_stream(sentencepiece, ids, skip=skip))
    assert streamed == sentencepiece.decode(ids, skip)
    assert streamed == sentencepiece_library.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(min_value=0, max_value=700), max_size=30), skip=st.booleans())
def test_sentencepiece_stream_equals_decode_on_any_ids(sentencepiece: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(_stream(sentencepiece, ids, skip=skip)) == sentencepiece.decode(ids, skip)


def test_characters_of_several_tokens_arrive_whole(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    """llama.cpp#4446, vllm#8627: 😀 and 客单价 in pieces must not become U+FFFD."""
    text = "a😀客单价b👩‍👩‍👧‍👦"
    characters = {byte: character for character, byte in byte_alphabet().items()}
    single_bytes = [byte_level.token_id(characters[byte]) for byte in text.encode()]
    for tokenizer, ids in (
        (byte_level, [token_id for token_id in single_bytes if token_id is not None]),
        (sentencepiece, [3 + byte for byte in text.encode()]),
    ):
        deltas = _stream(tokenizer, ids)
        assert "".join(deltas) == text
        assert "\ufffd" not in "".join(deltas)
        assert all(len(delta) <= 1 for delta in deltas)


def test_bytes_that_are_no_character_are_replaced_when_that_is_certain(sentencepiece: Tokenizer) -> None:
    euro, a = [3 + byte for byte in "€".encode()], sentencepiece.token_id("a")
    assert a is not None
    assert _stream(sentencepiece, [*euro[:2], a]) == ["", "", "\ufffda", ""]
    assert _stream(sentencepiece, euro[:2]) == ["", "", "\ufffd"]
    assert _stream(sentencepiece, [3 + 0xFF, a]) == ["\ufffd", "a", ""]


def test_an_incomplete_character_waits_across_skipped_tokens(sentencepiece: Tokenizer) -> None:
    euro = [3 + byte for byte in "€".encode()]
    assert _stream(sentencepiece, [euro[0], 2, euro[1], 2, euro[2]]) == ["", "", "", "", "€", ""]


def test_only_the_start_of_a_text_loses_its_space(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the cold day", add_special_tokens=False)
    assert "".join(_stream(sentencepiece, ids)) == "the cold day"
    assert "".join(_stream(sentencepiece, ids, starts_text=False)) == " the cold day"
    assert "".join(_stream(sentencepiece, [1, 2, *ids])) == "the cold day"


def test_ids_without_a_token_stand_for_nothing(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("cold", add_special_tokens=False)
    assert _stream(byte_level, [10**9, *ids, byte_level.vocab_size, -1])[0] == ""
    assert "".join(_stream(byte_level, [10**9, *ids, byte_level.vocab_size, -1])) == "cold"
    assert byte_level.token_bytes(10**9) == byte_level.token_bytes(-1) == b""


def _tokenizer(tokens: Sequence[str], decoder: decoders.Decoder) -> Tokenizer:
    backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.decoder = decoder
    return Tokenizer(backend)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decoders(scheme: str) -> None:
    tokenizer = _tokenizer(["▁a", "b", "▁", "▁▁", "c▁d"], decoders.Metaspace("▁", prepend_scheme=scheme))
    for ids in ([0, 1, 0], [2, 0], [3, 0, 3], [4, 4], [1, 3], []):
        assert "".join(_stream(tokenizer, ids)) == _library_decode(tokenizer, ids, True) == tokenizer.decode(ids, True)


def test_added_tokens_outside_of_the_byte_alphabet_stand_for_themselves(byte_level: Tokenizer) -> None:
    token_id = byte_level.token_id("<｜User｜>")
    assert token_id is not None
    assert byte_level.token_bytes(token_id) == "<｜User｜>".encode()
    assert byte_level.decode([token_id], False) == "<｜User｜>"
    assert byte_level.decode([token_id], True) == ""


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Strip(" ", 1, 0)]),
    ],
)
def test_a_decoder_whose_tokens_depend_on_their_neighbours_is_refused_by_name(decoder: decoders.Decoder) -> None:
    name = type(decoder).__name__
    with pytest.raises(UnknownDecoder, match="Strip" if name == "Sequence" else re.compile(name, re.IGNORECASE)):
        _tokenizer(["a"], decoder)


def test_a_tokenizer_without_a_decoder_is_refused() -> None:
    with pytest.raises(UnknownDecoder, match="of no steps"):
        Tokenizer(Backend(models.BPE({"a": 0}, [])))


def test_the_byte_alphabet_is_the_librarys() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    state = json.loads(decoders.ByteLevel().__getstate__())
    spelling = Spelling.of_decoder(state)
    for character, byte in alphabet.items():
        assert spelled(spelling.piece(character)) == bytes([byte])
    text = "naïve 😀\n\t"
    word = "".join(character for byte in text.encode() for character, b in alphabet.items() if b == byte)
    assert Backend(models.BPE()).decoder is None
    assert decoders.ByteLevel().decode([word]) == text == spelling.piece(word)
