"""Grammars are tried out before they reach the engine: off the event loop, within limits, each only once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Final

from llguidance import LLMatcher, LLTokenizer

from engine.constraints.grammars import parser_limits
from engine.constraints.tokenizer import build_tokenizer
from server.errors import InvalidRequest, NotSupported
from server.protocol.common import JsonObject
from server.structured.grammar import GrammarBuilder
from server.text.tokenizer import Tokenizer
from server.text.vocabulary import vocabulary

_REMEMBERED: Final = 2048  # verdicts on grammars
_MAX_MESSAGE: Final = 500  # characters


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that an answer must match, and the field of the request that asks for it."""

    grammar: str
    param: str
    parts: tuple[tuple[str, JsonObject], ...] = ()  # the schemas in it that come from fields of their own


class GrammarCompiler:
    """Says of a grammar whether answers can be written by it. One thread of its own compiles, with the interpreter lock
    released; whoever waits, waits in line."""

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int, timeout_seconds: float) -> None:
        self._text_tokenizer: Final = tokenizer
        self._max_bytes: Final = max_bytes
        self._timeout_seconds: Final = timeout_seconds
        self._verdicts: Final[OrderedDict[bytes, str]] = OrderedDict()  # of the compiling thread
        self._thread: Final = ThreadPoolExecutor(1, "grammars")
        self._thread.submit(lambda: self._tokenizer)  # the first request shall not wait for it

    async def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequest, NotSupported."""
        compiling = asyncio.get_running_loop().run_in_executor(self._thread, self._problem, constraint)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                param, problem = await compiling
        except TimeoutError as error:
            raise InvalidRequest(
                f"{constraint.param}: not compiled within {self._timeout_seconds:g} seconds; simplify it",
                param=constraint.param,
            ) from error
        if problem:
            raise InvalidRequest(f"{param}: {problem}", param=param)

    def check_size(self, num_bytes: int, param: str) -> None:
        """Raises InvalidRequest."""
        if num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"{param}: {num_bytes} bytes of schema or grammar, at most {self._max_bytes} are allowed", param=param
            )

    def _problem(self, constraint: Constraint) -> tuple[str, str]:
        """(the field at fault, what is wrong; "" if nothing is)."""
        problem = self._verdict(constraint.grammar)
        if problem:
            for param, schema in constraint.parts:
                builder = GrammarBuilder(self._text_tokenizer)
                if found := self._verdict(builder.build(builder.schema(schema))):
                    return param, found
        return constraint.param, problem

    def _verdict(self, grammar: str) -> str:
        """What is wrong with it; "" if nothing is."""
        key = sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        found = self._verdicts.get(key)
        if found is None:
            found = self._verdicts[key] = self._compile(grammar)
            if len(self._verdicts) > _REMEMBERED:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        return found

    def _compile(self, grammar: str) -> str:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask meets what compiling leaves for later
        return _first_line(matcher.get_error()) if matcher.is_error() else ""

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            return build_tokenizer(vocabulary(self._text_tokenizer, self._text_tokenizer.vocab_size))
        except ValueError as error:
            raise NotSupported(f"This model's answers cannot be constrained: {error}") from error


# What the library says in its own terms, as clients know it.
_SAID: Final[Mapping[str, str]] = {
    "oneOf constraints": "'oneOf' cannot be enforced unless its schemas visibly exclude each other; write 'anyOf'",
    "Too many items": "too many ways are open at once: require more of the properties, or write fewer alternatives",
}


def _first_line(message: str) -> str:
    """A problem as one line, without the state of the parser that may follow it."""
    for beginning, said in _SAID.items():
        if beginning in message:
            return said
    text = message.partition("\n<state>")[0].replace("<non-verbose/>", "")
    return " ".join(text.split())[:_MAX_MESSAGE] or "the grammar cannot be used"
