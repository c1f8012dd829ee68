"""Grammars, compiled once and kept by their content."""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.constraints.tokenizer import build_tokenizer
from engine.constraints.vocabulary import Vocabulary
from engine.errors import RequestRejected

_KEPT_GRAMMARS = 256  # of those that nobody uses
_COMPILING_THREADS = 2  # a long one does not keep the others waiting
_NICENESS = 10  # of these threads: who compiles leaves the processor to who computes
_MESSAGE_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar."""

    beginning: LLMatcher  # at the beginning of an output: to be copied, never to be moved on
    tokenizer: LLTokenizer  # by which it has been compiled


CompiledGrammar = Future[Grammar]
"""Its exception is RequestRejected."""


class GrammarStore:
    """Compiles in threads of its own. Thread-safe."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_COMPILING_THREADS, "grammars", initializer=_step_back)
        self._lock = threading.Lock()
        self._tokenizer: Future[LLTokenizer] | None = None
        # whatever somebody holds is found, and the latest are held here
        self._live: WeakValueDictionary[str, CompiledGrammar] = WeakValueDictionary()
        self._latest: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def use(self, vocabulary: Vocabulary) -> None:
        """Match by this vocabulary from now on."""
        with self._lock:
            self._tokenizer = self._pool.submit(build_tokenizer, vocabulary)
            self._live.clear()
            self._latest.clear()

    def compile(self, grammar: str) -> CompiledGrammar:
        """Begin to compile, or find what has been compiled. As long as the result is held it will be found again."""
        with self._lock:
            compiled = self._live.get(grammar)
            if compiled is None:
                compiled = self._live[grammar] = self._pool.submit(_compile, self._tokenizer, grammar)
            self._latest[grammar] = compiled
            self._latest.move_to_end(grammar)
            if len(self._latest) > _KEPT_GRAMMARS:
                self._latest.popitem(last=False)
            return compiled

    def close(self) -> None:
        """What has not begun to compile never will; no call may follow."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def parser_limits() -> LLParserLimits:
    """Bounds on one mask, some 20 ms: others in the step wait for it; and on a lexer's memory, some 100 MB."""
    return LLParserLimits(step_max_items=5_000, max_lexer_states=50_000, verbose_errors=False)


def _step_back() -> None:
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _compile(built: Future[LLTokenizer] | None, grammar: str) -> Grammar:
    if built is None:
        raise RequestRejected("this engine has no tokenizer to match a grammar by")
    try:
        tokenizer = built.result()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        matcher.compute_bitmask()  # the first mask meets what compiling leaves for later
    except BaseException as error:  # where its Rust code panics the class cannot be imported
        raise RequestRejected(f"the grammar cannot be compiled: {error}") from error
    if matcher.is_error():
        raise RequestRejected(f"the grammar cannot be compiled: {matcher_error(matcher)}")
    return Grammar(matcher, tokenizer)


def matcher_error(matcher: LLMatcher) -> str:
    """Why a matcher has failed, in one line."""
    return " ".join(matcher.get_error().split())[:_MESSAGE_CHARACTERS]
