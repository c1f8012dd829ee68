"""One choice's answer: text, tokens, logprobs and offsets that agree with each other, streamed or not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import TokenLogprobs
from server.text.output import ChoiceOutput, Delta, echo_prompt
from server.text.spelling import byte_alphabet
from server.text.tokenizer import Tokenizer

_EOS = 2


def _reported(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -token_id / 100, 1, ((token_id, -token_id / 100), (5, -9.0)))


def _stream(
    output: ChoiceOutput, ids: Sequence[int], sizes: Sequence[int] = (), *, logprobs: bool = True
) -> list[Delta]:
    """Push the ids in pieces of the given sizes (then one by one), then the end."""
    deltas, start, pieces = [], 0, list(sizes)
    while start < len(ids):
        part = ids[start : start + (pieces.pop(0) if pieces else 1)]
        start += len(part)
        deltas.append(output.push(part, [_reported(i) for i in part] if logprobs else [], finished=start == len(ids)))
    return deltas


def _joined(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        "".join(delta.text for delta in deltas),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(entry for delta in deltas for entry in delta.logprobs),
        next((delta.stop for delta in deltas if delta.stop is not None), None),
    )


def _byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each byte."""
    characters = {byte: character for character, byte in byte_alphabet().items()}
    ids = [tokenizer.token_id(characters[byte]) for byte in text.encode()]
    return [token_id for token_id in ids if token_id is not None]


_TEXTS = st.text(alphabet="ab \n😀客é", max_size=12)
_STOPS = st.lists(st.text(alphabet="ab \n😀客", min_size=1, max_size=4), max_size=3)


@settings(max_examples=500, deadline=None)
@given(
    text=_TEXTS,
    stops=_STOPS,
    sizes=st.lists(st.integers(1, 5), max_size=12),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_a_stream_adds_up_to_the_answer_in_one_piece(
    byte_level: Tokenizer, text: str, stops: list[str], sizes: list[int], include: bool, min_tokens: int
) -> None:
    ids = [*_byte_ids(byte_level, text), 1, 400]

    def output() -> ChoiceOutput:
        return ChoiceOutput(byte_level, stops=stops, include_stop=include, min_tokens=min_tokens)

    whole = output().push(ids, [_reported(i) for i in ids], finished=True)
    in_pieces = output()
    deltas = _stream(in_pieces, ids, sizes)
    assert _joined(deltas) == whole
    assert in_pieces.num_tokens == len(whole.token_ids) == len(whole.logprobs)
    assert in_pieces.num_tokens + in_pieces.num_overrun_tokens == len(ids)
    offsets = [entry.text_offset for entry in whole.logprobs]
    assert offsets == sorted(offsets)
    assert all(offset <= len(whole.text) for offset in offsets)


@settings(max_examples=300, deadline=None)
@given(text=_TEXTS, stops=_STOPS, sizes=st.lists(st.integers(1, 5), max_size=12))
def test_the_text_is_cut_before_the_first_stop(
    byte_level: Tokenizer, text: str, stops: list[str], sizes: list[int]
) -> None:
    ids = _byte_ids(byte_level, text)
    answer = _joined(_stream(ChoiceOutput(byte_level, stops=stops), ids, sizes))
    starts = [text.find(stop) for stop in stops if stop in text]
    assert answer.text == (text[: min(starts)] if starts else text)
    assert (answer.stop is not None) is bool(starts)


@settings(max_examples=200, deadline=None)
@given(text=_TEXTS, sizes=st.lists(st.integers(1, 5), max_size=12))
def test_logprobs_come_with_the_text_they_belong_to(byte_level: Tokenizer, text: str, sizes: list[int]) -> None:
    output = ChoiceOutput(byte_level, stops=["ab\n", "😀客"])
    num_sent, spelled = 0, b""
    for delta in _stream(output, _byte_ids(byte_level, text), sizes):
        num_sent += len(delta.text)
        spelled += b"".join(entry.token.utf8 for entry in delta.logprobs)
        assert len(delta.token_ids) == len(delta.logprobs)
        if delta.stop is not None:
            break
        assert len(spelled.decode()) <= num_sent  # decode() also checks that the characters are whole


def test_each_token_of_a_character_is_reported_with_its_own_bytes(byte_level: Tokenizer) -> None:
    ids = _byte_ids(byte_level, "a€b")
    deltas = _stream(ChoiceOutput(byte_level), ids)
    assert [delta.text for delta in deltas] == ["a", "", "", "€", "b"]
    assert [len(delta.logprobs) for delta in deltas] == [1, 0, 0, 3, 1]
    entries = _joined(deltas).logprobs
    assert [entry.token.utf8 for entry in entries] == [b"a", b"\xe2", b"\x82", b"\xac", b"b"]
    assert [entry.token.text for entry in entries] == ["a", "\\xe2", "\\x82", "\\xac", "b"]
    assert [entry.text_offset for entry in entries] == [0, 1, 1, 1, 2]


def test_offsets_count_replaced_bytes_as_characters(byte_level: Tokenizer) -> None:
    euro, a = _byte_ids(byte_level, "€"), _byte_ids(byte_level, "a")
    whole = ChoiceOutput(byte_level).push(
        ids := [*euro[:2], *a, euro[0], *euro], [_reported(i) for i in ids], finished=True
    )
    assert whole.text == "\ufffda\ufffd€"
    assert [entry.text_offset for entry in whole.logprobs] == [0, 0, 1, 2, 3, 3, 3]


def test_a_stop_across_tokens_ends_the_choice_and_what_follows_is_overrun(byte_level: Tokenizer) -> None:
    """TGI#1254, TGI#1039: a stop that starts and ends within tokens is found, and no part of it is sent."""
    ids = byte_level.encode("The quick brown fox jumps", add_special_tokens=False)
    texts = [byte_level.token_text(token_id) for token_id in ids]
    stop = (texts[1] + texts[2])[1:-1]
    output = ChoiceOutput(byte_level, stops=[stop])
    deltas = [output.push([token_id]) for token_id in ids]
    assert "".join(delta.text for delta in deltas) == "The quick brown fox jumps".partition(stop)[0]
    assert [delta.stop for delta in deltas].count(stop) == 1
    assert output.ended
    assert output.num_tokens == 3
    assert output.num_overrun_tokens == len(ids) - 3
    assert output.push([], finished=True) == Delta()


def test_include_stop_keeps_the_stop_string(byte_level: Tokenizer) -> None:
    ids = _byte_ids(byte_level, "one.two.three")
    answer = _joined(_stream(ChoiceOutput(byte_level, stops=[".t"], include_stop=True), ids))
    assert answer.text == "one.t"
    assert answer.stop == ".t"
    assert len(answer.token_ids) == 5


def test_an_undecided_stop_delivers_the_tokens_of_the_one_that_wins(byte_level: Tokenizer) -> None:
    output = ChoiceOutput(byte_level, stops=["bc", "abcd"])
    answer = _joined(_stream(output, _byte_ids(byte_level, "xabcz!")))
    assert (answer.text, answer.stop) == ("xa", "bc")
    assert len(answer.token_ids) == 4  # x, a, b, c; z was needed to decide
    assert output.num_overrun_tokens == 2


def test_stops_are_ignored_before_min_tokens(byte_level: Tokenizer) -> None:
    ids = _byte_ids(byte_level, "a.b.c.d")
    assert _joined(_stream(ChoiceOutput(byte_level, stops=["."], min_tokens=2), ids)).text == "a.b"
    assert _joined(_stream(ChoiceOutput(byte_level, stops=[".b"], min_tokens=2), ids)).text == "a.b.c.d"
    assert _joined(_stream(ChoiceOutput(byte_level, stops=["."], min_tokens=99), ids)).text == "a.b.c.d"


def test_the_stop_token_is_delivered_without_text(byte_level: Tokenizer) -> None:
    """vllm#4180, #5954: an end-of-turn token stops and leaves no text."""
    ids = _byte_ids(byte_level, "ab")
    output = ChoiceOutput(byte_level, skip_special_tokens=False)
    delta = output.push([*ids, _EOS], finished=True, stop_token=True)
    assert delta == Delta("ab", (*ids, _EOS))
    plain = byte_level.encode("fox", add_special_tokens=False)[-1]  # a stop token need not be special
    assert ChoiceOutput(byte_level).push([*ids, plain], finished=True, stop_token=True).text == "ab"
    kept = ChoiceOutput(byte_level, skip_special_tokens=False, include_stop=True)
    assert kept.push([*ids, _EOS], finished=True, stop_token=True).text == "ab<|im_end|>"


def test_a_string_stop_wins_over_what_the_engine_says_later(byte_level: Tokenizer) -> None:
    ids = [*_byte_ids(byte_level, "a.b"), _EOS]
    output = ChoiceOutput(byte_level, stops=["."])
    assert output.push(ids, finished=True, stop_token=True) == Delta("a", tuple(ids[:2]), (), ".")
    assert output.num_overrun_tokens == 2


def test_what_is_held_back_comes_with_the_end(byte_level: Tokenizer) -> None:
    ids = _byte_ids(byte_level, "ab<")
    output = ChoiceOutput(byte_level, stops=["<end>"])
    assert output.push(ids) == Delta("ab", tuple(ids[:2]))
    assert output.push([], finished=True) == Delta("<", (ids[2],))
    assert output.num_tokens == 3


def test_an_answer_that_continues_a_text_keeps_its_space(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("cold day", add_special_tokens=False)
    assert ChoiceOutput(sentencepiece, starts_text=False).push(ids, finished=True).text == " cold day"
    assert ChoiceOutput(sentencepiece, starts_text=True).push(ids, finished=True).text == "cold day"


# Echo


def _prompt_logprobs(ids: Sequence[int]) -> list[TokenLogprobs | None]:
    return [None, *[_reported(token_id) for token_id in ids[1:]]]


@pytest.mark.parametrize("text", ["The cold day", "a 😀 客单价", "x<|im_end|>y", "the", " the"])
def test_an_echoed_prompt_is_the_prompt(byte_level: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, sentencepiece):
        ids = tokenizer.encode(text, add_special_tokens=True)
        echo = echo_prompt(tokenizer, ids, text, _prompt_logprobs(ids))
        assert echo.text == text
        assert echo.token_ids == tuple(ids)
        assert len(echo.logprobs) == len(ids)
        assert echo.logprobs[0].token.logprob is None
        assert echo.logprobs[0].top == ()
        whole = [entry for entry in echo.logprobs if not tokenizer.is_special(entry.token.token_id)]
        for entry in whole[1:]:
            assert text.encode().find(entry.token.utf8, len(text[: entry.text_offset].encode())) >= 0


def test_echoed_ids_are_decoded(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the cold day", add_special_tokens=True)
    assert ids[0] == 1
    echo = echo_prompt(sentencepiece, ids, None, _prompt_logprobs(ids))
    assert echo.text == "the cold day"
    assert [entry.text_offset for entry in echo.logprobs[:2]] == [0, 0]


def test_offsets_go_on_after_an_echoed_prompt(byte_level: Tokenizer) -> None:
    """vllm#47815: the offsets of the answer count from the start of the prompt, streamed or not."""
    prompt, answer = "The quick ", _byte_ids(byte_level, "fox.")
    prompt_ids = byte_level.encode(prompt, add_special_tokens=False)
    echo = echo_prompt(byte_level, prompt_ids, prompt, _prompt_logprobs(prompt_ids))

    def output() -> ChoiceOutput:
        return ChoiceOutput(byte_level, starts_text=False, text_offset=len(echo.text))

    streamed = _joined([echo, *_stream(output(), answer)])
    whole = _joined([echo, output().push(answer, [_reported(i) for i in answer], finished=True)])
    assert streamed == whole
    offsets = [entry.text_offset for entry in whole.logprobs]
    assert offsets[len(prompt_ids) :] == [10, 11, 12, 13]
    assert all(later > earlier for earlier, later in pairwise(offsets))
    for entry in whole.logprobs:
        assert whole.text.startswith(entry.token.text, entry.text_offset)


def test_without_logprobs_an_echo_is_text_and_ids(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("fox", add_special_tokens=False)
    assert echo_prompt(byte_level, ids, "fox") == Delta("fox", tuple(ids))
