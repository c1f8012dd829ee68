"""Constrained sequences, token by token: what each has matched, and which tokens may come next.

Where a grammar leaves no choice in the text, the tokens are those that the tokenizer cuts that text into, whether each
is drawn (its mask then has one bit) or all are taken at once (fast-forward): the outputs are the same.

An output is finished as soon as its grammar can take nothing more: no end token is drawn for that. Where a grammar
accepts the output and could go on, the request's own stop tokens are what ends it, and no other end token is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from engine.constraints.grammars import CompiledGrammar, Grammar, GrammarStore, matcher_error
from engine.errors import RequestRejected
from engine.types import GenerationRequest

TokenBits = npt.NDArray[np.uint32]

_WORD_BITS = 32
_ALL = 0xFFFF_FFFF


class Taken(NamedTuple):
    """What became of a drawn token: itself and those that follow of necessity, or why the sequence cannot go on."""

    token_ids: tuple[int, ...] = ()
    finished: bool = False  # nothing can follow
    error: str | None = None


class Matching:
    """Where one sequence stands in its grammar. `row` is that of its mask in Constraints.masks.

    Between Constraints.ask() (or begin()) and wait() it belongs to the thread that computes masks.
    """

    __slots__ = (
        "_eos_token_ids",
        "_fast_forward",
        "_forced",
        "_matcher",
        "_num_outputs",
        "_record",
        "accepting",
        "ended",
        "error",
        "row",
    )

    def __init__(self, record: GenerationRequest, row: int, fast_forward: bool) -> None:
        sampling = record.sampling
        self.row = row
        self.error: str | None = None
        self.ended = False  # by a stop token, or because the grammar takes nothing more
        self.accepting = False  # when its mask was computed: the output may end here
        self._record = record
        self._matcher: LLMatcher | None = None
        self._eos_token_ids: Sequence[int] = ()
        self._num_outputs = 0
        self._forced: deque[int] = deque()  # the tokens that come next, as far as they are known
        # what is not drawn has no logprob, and passes no other mask
        is_drawn = sampling.logprobs is not None or sampling.allowed_token_ids is not None or bool(sampling.bad_words)
        self._fast_forward = fast_forward and not is_drawn

    @property
    def needs_mask(self) -> bool:
        """Whether the matcher has to be asked for it."""
        return self.error is None and not self._forced

    @property
    def matcher(self) -> LLMatcher:
        if self._matcher is None:
            raise RuntimeError("the matching has not begun")
        return self._matcher

    def start(self, grammar: Grammar) -> None:
        """Match the outputs so far."""
        self._matcher = grammar.beginning.deep_copy()
        self._eos_token_ids = grammar.tokenizer.eos_tokens
        self._look_ahead()
        for token_id in self._record.output_token_ids:
            self._advance(token_id)
            if self.error is not None:
                return

    def fail(self, error: str) -> None:
        self.error = error

    def take(self, token_id: int) -> Taken:
        """Go on by a drawn token, and by what is forced behind it under fast-forward, max_tokens at most."""
        if self.error is None:
            token_ids = [token_id]
            self._advance(token_id)
            while self._fast_forward and self._may_go_on():
                token_ids.append(self._forced[0])
                self._advance(self._forced[0])
        if self.error is not None:
            return Taken(error=self.error)
        return Taken(tuple(token_ids), self.ended)

    def _may_go_on(self) -> bool:
        if not self._forced or self.error is not None:
            return False
        sampling = self._record.sampling
        is_early = self._num_outputs < sampling.min_tokens and self._forced[0] in self._record.stop_token_ids
        return self._num_outputs < sampling.max_tokens and not is_early

    def _advance(self, token_id: int) -> None:
        self._num_outputs += 1
        if token_id in self._record.stop_token_ids and self._num_outputs > self._record.sampling.min_tokens:
            self._forced.clear()
            self.ended = True
            return
        if self._forced and self._forced[0] == token_id:
            self._forced.popleft()
        else:
            self._forced.clear()
        matcher = self.matcher
        if not matcher.consume_token(token_id):
            self._forced.clear()
            self.fail(f"token {token_id} does not match the grammar: {matcher_error(matcher)}")
        elif matcher.is_stopped():
            self._forced.clear()
            self.ended = True
        elif not self._forced:
            self._look_ahead()

    def _look_ahead(self) -> None:
        self._forced.extend(self.matcher.compute_ff_tokens())

    def complete_mask(self, bits: TokenBits) -> None:
        """Make of what the matcher says, if it was asked, what the draw needs; of a failed one all bits are set."""
        if self._forced:
            self.accepting = False
            bits[:] = 0
            _set(bits, self._forced[0])
            return
        if self.error is None and self.matcher.is_error():
            self.fail(f"the grammar cannot be followed: {matcher_error(self.matcher)}")
        if self.error is not None:
            bits[:] = _ALL
            return
        self.accepting = self.matcher.is_accepting()
        if self.accepting:
            for token_id in self._eos_token_ids:
                bits[token_id // _WORD_BITS] &= ~np.uint32(1 << token_id % _WORD_BITS)
            for token_id in self._record.stop_token_ids:
                _set(bits, token_id)


def _set(bits: TokenBits, token_id: int) -> None:
    bits[token_id // _WORD_BITS] |= np.uint32(1 << token_id % _WORD_BITS)


class Constraints:
    """The constrained sequences of one executor. One caller.

    Masks are computed in a thread that holds the interpreter lock only to begin and to end: while the caller plans the
    next step and runs its forward pass. `masks` [max_num_seqs, ⌈vocab_size / 32⌉] are valid after wait(), each until
    its matching is asked about again.
    """

    def __init__(
        self,
        grammars: GrammarStore,
        vocab_size: int,
        max_num_seqs: int,
        *,
        fast_forward: bool = True,
        num_threads: int = 1,
    ) -> None:
        self.masks: TokenBits = np.zeros((max_num_seqs, -(-vocab_size // _WORD_BITS)), np.uint32)
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._fast_forward = fast_forward
        self._num_threads = num_threads
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._thread = ThreadPoolExecutor(1, "masks")  # one: what is asked is done in order
        self._asked: list[Future[None]] = []

    def begin(self, record: GenerationRequest, grammar: str) -> Matching:
        """A sequence that is new or comes back with outputs; its mask is asked for."""
        matching = Matching(record, self._free_rows.pop(), self._fast_forward)
        self._asked.append(self._thread.submit(self._begin, matching, self._grammars.compile(grammar)))
        return matching

    def end(self, matching: Matching) -> None:
        """The sequence has gone."""
        self._free_rows.append(matching.row)

    def ask(self, matchings: Sequence[Matching]) -> None:
        """Compute the masks of their next tokens, but for those that have ended."""
        live = [matching for matching in matchings if not matching.ended and matching.error is None]
        if live:
            self._asked.append(self._thread.submit(self._fill, live))

    def wait(self) -> None:
        """Until all masks are there."""
        asked, self._asked = self._asked, []
        for future in asked:
            future.result()

    def close(self) -> None:
        """End the thread; no call may follow."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- in the thread ------------------------------------------------------------------------------------------------

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(self._num_threads)

    def _begin(self, matching: Matching, compiled: CompiledGrammar) -> None:
        try:
            grammar = compiled.result()
        except RequestRejected as error:
            matching.fail(str(error))
        else:
            if grammar.tokenizer.vocab_size == self._vocab_size:
                matching.start(grammar)
            else:
                matching.fail(f"the tokenizer has {grammar.tokenizer.vocab_size} tokens, the model {self._vocab_size}")
        self._fill([matching])

    def _fill(self, matchings: Sequence[Matching]) -> None:
        open_ones = [(matching.matcher, matching.row) for matching in matchings if matching.needs_mask]
        num_rows, num_words = self.masks.shape
        row_bytes = num_words * self.masks.itemsize
        if len(open_ones) == 1:  # needs no second thread
            [(matcher, row)] = open_ones
            matcher.unsafe_compute_mask_ptr(self.masks.ctypes.data + row * row_bytes, row_bytes)
        elif open_ones:
            self._executor.unsafe_compute_mask_ptr(open_ones, self.masks.ctypes.data, row_bytes, num_rows)
        for matching in matchings:
            matching.complete_mask(self.masks[matching.row])
