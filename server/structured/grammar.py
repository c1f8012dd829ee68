"""Pieces of an llguidance grammar, put together: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.

A grammar is a Lark text whose rules may refer to named grammars beside it, JSON schemas above all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark, is_lark_syntax

from server.protocol.common import JsonObject
from server.text.tokenizer import Tokenizer

# Between the parts of JSON: a space, or a line break with its indentation. Enough for JSON as people write it, and a
# model cannot go on with blanks for ever.
WHITESPACE: Final = r"[ ]|\n[ ]{0,40}|\n\t{0,10}"
_MARKS: Final = re.compile(r"(<[^<>]{1,60}>|\[[^\[\]]{1,60}\])")  # what control tokens look like
_MAX_GBNF_CHARS: Final = 65_536  # converting takes Python, a while for more than this


class GrammarError(ValueError):
    """A grammar that cannot be read; the message is fit for the client."""


class GrammarBuilder:
    """One grammar under construction, in the words of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Final = tokenizer
        self._beside: Final[list[JsonObject]] = []
        self._rules: Final[list[str]] = []

    def rule(self, name: str, body: str) -> str:
        """Add a rule, or, with a name in capitals, a terminal; returns how others refer to it."""
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def schema(self, schema: JsonObject, whitespace: str | None = WHITESPACE) -> str:
        """JSON values of a prepared schema; `whitespace` None: none at all between their parts."""
        options: JsonObject = (
            {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
        )
        return self._add({"json_schema": schema | {"x-guidance": options}})

    def lark(self, text: str) -> str:
        """A grammar of its own, with a rule `start`."""
        return self._add({"lark_grammar": text})

    def _add(self, grammar: JsonObject) -> str:
        name = f"part_{len(self._beside)}"
        self._beside.append({"name": name, **grammar})
        return f"@{name}"

    def literal(self, text: str) -> str:
        """This very text, in which the vocabulary's control tokens are single tokens. "" for no text."""
        pieces, plain = list[str](), ""
        for piece in _MARKS.split(text):
            if self.is_token(piece):
                pieces += [quoted(plain)] * bool(plain) + [self._token(piece)]
                plain = ""
            else:
                plain += piece
        return " ".join(pieces + [quoted(plain)] * bool(plain))

    def _token(self, text: str) -> str:
        return f"<[{self._tokenizer.control_ids[text]}]>"

    def is_token(self, text: str) -> bool:
        """Whether the vocabulary has this text as one control token."""
        return text in self._tokenizer.control_ids

    def until(self, name: str, mark: str, text: str = "TEXT") -> str:
        """Text up to and with a mark, the first there is: spelled in letters or, where there is one, as its token."""
        spelled = self.rule(f"{name}_spelled[lazy]", f"{text} {quoted(mark)}")
        return f"({spelled} | {text} {self._token(mark)})" if self.is_token(mark) else spelled

    def build(self, start: str) -> str:
        """The whole: a JSON text. TEXT is any text without control tokens."""
        rules = "\n".join([f"start: {start}", *self._rules, r"TEXT: /(?s:.*)/"])
        return json.dumps({"grammars": [{"lark_grammar": rules}, *self._beside]}, ensure_ascii=False)


def quoted(text: str) -> str:
    """A text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def regex_terminal(pattern: str) -> str:
    r"""A regular expression as a terminal of Lark; \d is ASCII."""
    return f"/{regex_to_lark(pattern, 'd')}/"


def choices_rule(choices: Sequence[str]) -> str:
    """One of these texts. None is empty."""
    return " | ".join(map(quoted, choices))


def lark_of(text: str) -> str:
    """A grammar in Lark's notation, given in that or in GBNF (EBNF as llama.cpp has it). Raises GrammarError."""
    if is_lark_syntax(text):
        return text
    if len(text) > _MAX_GBNF_CHARS:
        raise GrammarError(f"a grammar in GBNF may have {_MAX_GBNF_CHARS} characters, this one has {len(text)}")
    try:
        lark: str = gbnf_to_lark(text)
    except (GbnfToLarkError, RecursionError, ValueError, LookupError) as error:
        raise GrammarError(f"neither Lark nor GBNF: {str(error)[:300]}") from error
    return lark
