"""Answers taken apart: every format, every way to cut the text into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.structured.call_formats import (
    BARE_JSON,
    BRACKETED,
    BRACKETED_ARGS,
    BRACKETED_SPACED,
    GENERIC,
    HERMES,
    PYTHONIC,
    CallFormat,
)
from server.structured.parser import AnswerParts, AnswerSyntax, Piece, ReasoningMarks, added_up

FORMATS = (GENERIC, HERMES, BARE_JSON, BRACKETED, BRACKETED_ARGS, BRACKETED_SPACED, PYTHONIC)
ARGUMENTS: dict[str, Any] = {"city": 'S\\ã"o) ,=]}{', "days": [1, 2.5, None], "deep": {"a": True, "b": "True, None"}}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", ARGUMENTS), ("now", {})]
THINK = ReasoningMarks("<think>", "</think>", open=False)
INSIDE = ReasoningMarks("<think>", "</think>", open=True)


def read(syntax: AnswerSyntax, text: str, size: int = 1) -> AnswerParts:
    parser = syntax.parser()
    pieces: list[Piece] = []
    for start in range(0, len(text), size):
        pieces += parser.feed(text[start : start + size])
    return added_up(pieces + parser.end())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("calls", FORMATS, ids=lambda calls: calls.name)
def test_calls_are_read_as_they_are_written_however_the_text_is_cut(calls: CallFormat, size: int) -> None:
    told = read(AnswerSyntax(calls=calls), calls.write(CALLS), size)
    assert [(name, json.loads(arguments)) for name, arguments in told.calls] == CALLS
    assert told.content == ""


@pytest.mark.parametrize("calls", [c for c in FORMATS if c.after_text], ids=lambda calls: calls.name)
def test_text_may_come_before_calls(calls: CallFormat) -> None:
    told = read(AnswerSyntax(calls=calls), "Let me see: <tool, [TOOL, " + calls.write(CALLS[:1]))
    assert told.content == "Let me see: <tool, [TOOL, "
    assert [name for name, _ in told.calls] == ["get_weather"]


@pytest.mark.parametrize("calls", FORMATS, ids=lambda calls: calls.name)
def test_an_answer_without_calls_is_text(calls: CallFormat) -> None:
    text = "No <tool_ca is needed, [] {} here.<tool"
    assert read(AnswerSyntax(calls=calls), text) == AnswerParts("", text, ())


@pytest.mark.parametrize("calls", FORMATS, ids=lambda calls: calls.name)
def test_a_call_may_be_cut_anywhere(calls: CallFormat) -> None:
    whole = calls.write(CALLS[:1])
    before: tuple[str, ...] = ()
    for end in range(len(whole)):
        told = read(AnswerSyntax(calls=calls), whole[:end])
        seen = tuple(name + arguments for name, arguments in told.calls)
        assert all(now.startswith(then) for now, then in zip(seen, before, strict=False))
        assert len(seen) >= len(before)
        before = seen


def test_a_name_comes_once_and_before_its_arguments() -> None:
    parser = AnswerSyntax(calls=HERMES).parser()
    pieces = [piece for character in HERMES.write(CALLS) for piece in parser.feed(character)]
    kinds = [(piece.kind, piece.call) for piece in pieces]
    assert kinds.count(("call", 0)) == kinds.count(("call", 1)) == 1
    assert kinds[0] == ("call", 0)
    assert [call for _, call in kinds] == sorted(call for _, call in kinds)
    assert not parser.in_call


def test_what_does_not_parse_is_text() -> None:
    text = "<tool_call>\nnonsense</tool_call>"
    assert read(AnswerSyntax(calls=HERMES), text) == AnswerParts("", text, ())


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_is_told_apart(size: int) -> None:
    assert read(AnswerSyntax(THINK), "\n<think>\nHm </thin.\n</think>\n\nYes.", size) == AnswerParts(
        "Hm </thin.\n", "Yes.", ()
    )
    assert read(AnswerSyntax(INSIDE), "Hm.</think>Yes <think>.", size) == AnswerParts("Hm.", "Yes <think>.", ())
    assert read(AnswerSyntax(THINK), "<thing> Yes.", size) == AnswerParts("", "<thing> Yes.", ())
    assert read(AnswerSyntax(INSIDE), "Hm. And then", size) == AnswerParts("Hm. And then", "", ())
    assert read(AnswerSyntax(THINK), "  <thi", size) == AnswerParts("", "  <thi", ())


def test_calls_come_after_reasoning() -> None:
    told = read(AnswerSyntax(INSIDE, BARE_JSON), "A call.</think>\n\n" + BARE_JSON.write(CALLS[1:]))
    assert told == AnswerParts("A call.", "", (("now", "{}"),))


def test_a_control_token_may_come_before_a_llama_call() -> None:
    assert read(AnswerSyntax(calls=BARE_JSON), "<|python_tag|>" + BARE_JSON.write(CALLS[1:])).calls == (("now", "{}"),)
