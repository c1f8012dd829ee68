"""The arguments of a call as they stream in: where they end, and their JSON."""

from __future__ import annotations

import re
from typing import Final

_PLAIN: Final = re.compile(r'[^"\\{}\[\]]+')  # outside of strings
_IN_STRING: Final = re.compile(r'[^"\\]+')


class JsonObjectScanner:
    """Passes the text of one JSON object through and notices its end."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> tuple[str, int]:
        """(what of the object's text is new, how many characters of `text` it took)."""
        used = 0
        while used < len(text) and not self.done:
            used = self._step(text, used)
        return text[:used], used

    def _step(self, text: str, at: int) -> int:
        """Past one character, or a run of characters without a meaning."""
        if self._escaped:
            self._escaped = False
            return at + 1
        if run := (_IN_STRING if self._in_string else _PLAIN).match(text, at):
            return run.end()
        character = text[at]
        if character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = not self._in_string
        elif character in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.done = self._depth <= 0
        return at + 1


_NAME: Final = re.compile(r"\s*,?\s*(\w+)=")
_CLOSING: Final = re.compile(r"\s*\)")
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_WORD: Final = re.compile(r"\b(True|False|None)\b")


class KeywordScanner:
    """Turns keyword arguments, `a="x", b=[True]`, into a JSON object; the text ends before the bracket that closes the
    call. Each argument comes when it is whole."""

    def __init__(self) -> None:
        self.done = False
        self._num_told = 0

    def feed(self, text: str) -> tuple[str, int]:
        """(what of the object's text is new, how many characters of `text` it took)."""
        told, at = [], 0
        while True:
            if _CLOSING.match(text, at):
                self.done = True
                told.append("}" if self._num_told else "{}")
                return "".join(told), at
            name = _NAME.match(text, at)
            end = None if name is None else _value_end(text, name.end())
            if name is None or end is None:
                return "".join(told), at
            told.append(f'{", " if self._num_told else "{"}"{name[1]}": {json_of_python(text[name.end() : end])}')
            self._num_told += 1
            at = end


def _value_end(text: str, start: int) -> int | None:
    """Where a value ends: before the comma or the closing bracket that follows it. None: not here."""
    depth, in_string, at = 0, False, start
    while at < len(text):
        character = text[at]
        if in_string:
            at += character == "\\"
            in_string = character != '"'
        elif character == '"':
            in_string = True
        elif depth == 0 and character in ",)":
            return at
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        at += 1
    return None


def json_of_python(value: str) -> str:
    """A literal with strings in double quotes, as JSON."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', value)
    return "".join(part if index % 2 else _WORD.sub(lambda m: _WORDS[m[0]], part) for index, part in enumerate(parts))
