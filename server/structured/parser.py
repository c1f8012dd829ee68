"""A constrained answer's text, piece by piece → its reasoning, its text and its tool calls, as they come.

Nothing is held back longer than it takes to tell a mark from text. What does not parse (an engine that ignores the
grammar) comes out as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from server.structured.call_formats import CallFormat
from server.structured.values import JsonObjectScanner, KeywordScanner

Kind = Literal["reasoning", "content", "call", "arguments"]


class Piece(NamedTuple):
    """What is new in an answer. The pieces of one kind (and call) add up."""

    kind: Kind
    text: str  # of a call: the function's name
    call: int = -1  # which one, from 0


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """A whole answer, taken apart."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]  # (name, arguments as JSON, which may be cut)


def added_up(pieces: Sequence[Piece]) -> AnswerParts:
    """All pieces of an answer as a whole."""
    names = [piece.text for piece in pieces if piece.kind == "call"]
    arguments = [""] * len(names)
    for piece in pieces:
        if piece.kind == "arguments":
            arguments[piece.call] += piece.text
    texts = {kind: "".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("reasoning", "content")}
    return AnswerParts(texts["reasoning"], texts["content"], tuple(zip(names, arguments, strict=True)))


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The tags around reasoning. `open`: the prompt ends within them."""

    begin: str
    end: str
    open: bool


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """What an answer may consist of beside text."""

    reasoning: ReasoningMarks | None = None
    calls: CallFormat | None = None

    def parser(self) -> AnswerParser:
        return AnswerParser(self)


class AnswerParser:
    """Of one choice."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._syntax: Final = syntax
        self._buffer = ""
        reasoning = syntax.reasoning
        self._state = self._text_start if reasoning is None else self._reasoning if reasoning.open else self._start
        self._trim = reasoning is not None and reasoning.open  # blanks are left out where a part begins
        self._scanner: JsonObjectScanner | KeywordScanner | None = None
        self.num_calls = 0
        self.in_call = False  # the last call is not complete

    @property
    def in_reasoning(self) -> bool:
        """Whether the answer's reasoning has begun and not ended."""
        return self._state == self._reasoning

    def feed(self, text: str) -> list[Piece]:
        """What a further piece of the answer brings."""
        self._buffer += text
        return list(self._run())

    def end(self) -> list[Piece]:
        """What was held back, when no more text comes."""
        pieces = list(self._run())
        rest, self._buffer = self._buffer, ""
        if not rest or self.num_calls or self._trimmed(rest) == "":
            return pieces
        return [*pieces, Piece("reasoning" if self._state == self._reasoning else "content", self._trimmed(rest))]

    def _run(self) -> Iterator[Piece]:
        """Let the states take from the buffer until they wait for more."""
        while True:
            before = (self._state, self._buffer)
            yield from self._state()
            if (self._state, self._buffer) == before:
                return

    # Reasoning

    def _start(self) -> Iterator[Piece]:
        """Before the first character that is none of a blank: reasoning or not?"""
        marks = self._syntax.reasoning
        assert marks is not None  # by the constructor
        seen = self._buffer.lstrip()
        if seen.startswith(marks.begin):
            self._buffer = seen[len(marks.begin) :]
            self._state, self._trim = self._reasoning, True
        elif not marks.begin.startswith(seen):
            self._state = self._text_start
        return iter(())

    def _reasoning(self) -> Iterator[Piece]:
        marks = self._syntax.reasoning
        assert marks is not None  # by the constructor
        text, found = self._take_until(marks.end)
        if text := self._trimmed(text):
            yield Piece("reasoning", text)
        if found:
            self._state, self._trim = self._text_start, True

    # Text

    def _text_start(self) -> Iterator[Piece]:
        """Before the first character of the text: does a call begin?"""
        self._buffer = self._trimmed(self._buffer)
        calls = self._syntax.calls
        if calls is None or calls.after_text:
            if self._buffer:
                self._state = self._text
            return iter(())
        seen = self._buffer
        if calls.optional_begin and seen.startswith(calls.optional_begin):
            seen = seen[len(calls.optional_begin) :]
        if calls.optional_begin and seen and calls.optional_begin.startswith(seen):
            return iter(())
        if seen.startswith(calls.trigger):
            self._buffer, self._state = seen, self._header
        elif seen:
            self._state = self._plain
        return iter(())

    def _text(self) -> Iterator[Piece]:
        calls = self._syntax.calls
        if calls is None:
            self._state = self._plain
            return
        text, found = self._take_until(calls.trigger)
        if text:
            yield Piece("content", text)
        if found:
            self._buffer = calls.trigger + self._buffer
            self._state = self._header

    def _plain(self) -> Iterator[Piece]:
        text, self._buffer = self._buffer, ""
        if text:
            yield Piece("content", text)

    # Calls

    def _header(self) -> Iterator[Piece]:
        """Before a call's arguments: its name."""
        calls = self._syntax.calls
        assert calls is not None  # by the states before
        first = calls.begin if self.num_calls == 0 else ""
        found = re.match(
            rf"\s*{re.escape(first)}{re.escape(calls.before_name)}([\w-]+){re.escape(calls.before_arguments)}",
            self._buffer,
        )
        if found is None:
            return
        self._buffer = self._buffer[found.end() :]
        self._scanner = KeywordScanner() if calls.arguments == "python" else JsonObjectScanner()
        self._state = self._arguments
        self.in_call = True
        self.num_calls += 1
        yield Piece("call", found[1], self.num_calls - 1)

    def _arguments(self) -> Iterator[Piece]:
        scanner = self._scanner
        assert scanner is not None  # by the state before
        text, used = scanner.feed(self._buffer)
        self._buffer = self._buffer[used:]
        if text:
            yield Piece("arguments", text, self.num_calls - 1)
        if scanner.done:
            self.in_call = False
            self._state = self._after

    def _after(self) -> Iterator[Piece]:
        """After a call's arguments: another call, or the end."""
        calls = self._syntax.calls
        assert calls is not None  # by the states before
        after = calls.after_arguments + calls.between
        if len(self._buffer) > len(after) and self._buffer.startswith(after):
            self._buffer = self._buffer[len(after) :]
            self._state = self._header
        return iter(())

    # The buffer

    def _take_until(self, mark: str) -> tuple[str, bool]:
        """(the text before the mark, whether the mark is there); both are taken. A beginning of the mark at the end
        stays."""
        place = self._buffer.find(mark)
        if place >= 0:
            text, self._buffer = self._buffer[:place], self._buffer[place + len(mark) :]
            return text, True
        kept = next(
            (n for n in range(min(len(mark) - 1, len(self._buffer)), 0, -1) if self._buffer.endswith(mark[:n])), 0
        )
        cut = len(self._buffer) - kept
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return text, False

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text
