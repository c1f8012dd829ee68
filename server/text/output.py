"""One choice's answer: tokens in, text, logprobs and the count of delivered tokens out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine.types import TokenLogprobs
from server.text.detokenizer import Detokenizer
from server.text.stops import StopMatcher
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReportedToken:
    """A token and its logprob."""

    token_id: int
    text: str  # escapes where the bytes are no whole characters: \\xf0\\x9f
    utf8: bytes
    logprob: float | None  # None: the first token of a prompt has none


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """What is reported of one position of a text."""

    token: ReportedToken
    rank: int | None  # 1 = the most likely token
    top: tuple[ReportedToken, ...]  # most likely first
    text_offset: int  # the character of the choice's text that the token begins in


class Delta(NamedTuple):
    """The next part of an answer. The parts of all deltas add up to the whole answer."""

    text: str = ""
    token_ids: tuple[int, ...] = ()  # delivered tokens: their text is in this delta or in ones before
    logprobs: tuple[LogprobEntry, ...] = ()  # one per delivered token if the engine reported logprobs
    stop: str | None = None  # the stop string that ended the choice


class _Held(NamedTuple):
    """A token that has arrived and is not delivered yet."""

    token_id: int
    start: int  # the character of the answer that the token begins in
    end: int  # characters of the answer that are whole with this token
    whole: bool  # False: the token ends within a character
    logprobs: TokenLogprobs | None


class ChoiceOutput:
    """Detokenizer, stop strings and bookkeeping of one choice.

    A token is delivered with the last character that it takes part in, so that text, ids and logprobs of a stream
    never run apart. The choice ends with the token that completes a stop string: later tokens are not delivered,
    nor is text from the stop on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        starts_text: bool = True,
        text_offset: int = 0,
    ) -> None:
        """`include_stop`: the stop string or stop token is part of the text. `min_tokens`: the text of the first so
        many tokens takes no part in stops. `starts_text`: False if the answer continues the prompt's text.
        `text_offset`: characters of an echoed prompt before it. Raises ValueError for an empty stop."""
        self._tokenizer: Final = tokenizer
        self._detokenizer: Final = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, starts_text=starts_text
        )
        self._matcher: Final = StopMatcher(stops)
        self._include_stop: Final = include_stop
        self._min_tokens: Final = min_tokens if stops else 0
        self._text_offset: Final = text_offset
        self._held: Final[deque[_Held]] = deque()
        self._num_arrived = 0
        self._num_decoded = 0  # characters of the answer, sent or held
        self._num_unwatched = 0  # characters of the first min_tokens tokens
        self._num_sent = 0
        self.ended = False
        self.num_tokens = 0  # delivered
        self.num_overrun_tokens = 0  # arrived, but after the end

    @property
    def num_undelivered(self) -> int:
        """Tokens that arrived and are not delivered: behind the end, or held back."""
        return self.num_overrun_tokens + len(self._held)

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        *,
        finished: bool = False,
        stop_token: bool = False,
    ) -> Delta:
        """Take what the engine sent; returns what can be sent to the client, which may be nothing.

        `logprobs`: none, or one per token. `finished`: no more will come. `stop_token`: the last of `token_ids` is
        the stop token that ended the choice: it is delivered, without text unless `include_stop`.
        """
        texts = []
        silent = len(token_ids) - 1 if stop_token and not self._include_stop else -1
        for index, token_id in enumerate(token_ids):
            if self.ended:
                self.num_overrun_tokens += 1
                continue
            texts.append(self._take(token_id, logprobs[index] if logprobs else None, index == silent))
            self.ended = self._matcher.match is not None
        if finished and not self.ended:
            texts.append(self._finish())
            self.ended = True
        return self._delta("".join(texts))

    def _take(self, token_id: int, logprobs: TokenLogprobs | None, silent: bool) -> str:
        """One token; returns the text that may be sent with it."""
        start = self._num_decoded
        if logprobs is not None:
            start += self._detokenizer.starts_at(token_id)
        text = "" if silent else self._detokenizer.push(token_id)
        self._num_decoded += len(text)
        self._held.append(_Held(token_id, start, self._num_decoded, not self._detokenizer.pending, logprobs))
        self._num_arrived += 1
        if self._num_arrived <= self._min_tokens:
            self._num_unwatched += len(text)
            return text
        return self._matcher.feed(text)

    def _finish(self) -> str:
        rest = self._detokenizer.flush()
        self._num_decoded += len(rest)
        return self._matcher.feed(rest) + self._matcher.flush()

    def _delta(self, text: str) -> Delta:
        match = self._matcher.match
        if match is None:
            self._num_sent += len(text)
            return Delta(text, *self._deliver())
        if not self._held:  # the end has been told before
            return Delta()
        if self._include_stop:
            text += match.stop
        self._num_sent += len(text)
        return Delta(text, *self._deliver_until(self._num_unwatched + match.end), match.stop)

    def _deliver(self) -> tuple[tuple[int, ...], tuple[LogprobEntry, ...]]:
        """The tokens whose characters have all been sent; at the end, all."""
        held, num_sent, done = self._held, self._num_sent, []
        while held and (self.ended or held[0].end + (not held[0].whole) <= num_sent):
            done.append(held.popleft())
        return self._report(done)

    def _deliver_until(self, end: int) -> tuple[tuple[int, ...], tuple[LogprobEntry, ...]]:
        """The tokens up to the one that made `end` characters whole; those after it are overrun."""
        done = [self._held.popleft()]
        while self._held and done[-1].end < end:
            done.append(self._held.popleft())
        self.num_overrun_tokens += len(self._held)
        self._held.clear()
        return self._report(done)

    def _report(self, done: list[_Held]) -> tuple[tuple[int, ...], tuple[LogprobEntry, ...]]:
        self.num_tokens += len(done)
        entries = [
            _entry(self._tokenizer, token.logprobs, self._text_offset + min(token.start, self._num_sent))
            for token in done
            if token.logprobs is not None
        ]
        return tuple([token.token_id for token in done]), tuple(entries)


def echo_prompt(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    text: str | None,
    logprobs: Sequence[TokenLogprobs | None] = (),
    *,
    skip_special_tokens: bool = True,
) -> Delta:
    """The prompt as the beginning of an answer.

    `text`: the prompt as the client gave it; None if it gave token ids, which are then decoded. `logprobs`: none,
    or one per token, the first None. Every token has an entry, BOS too, whose offset is where it begins in the
    text; if the tokenizer changes text (Unicode normalisation), the offsets are those in the changed text.
    """
    num_hidden = 0  # tokens that stand for nothing in the text that the client gave: the tokenizer's prefix
    if text is None:
        text = tokenizer.decode(token_ids, skip_special_tokens)
    else:
        skip_special_tokens = False
        prefix = tokenizer.prefix_ids
        if tuple(token_ids[: len(prefix)]) == prefix and not text.startswith(tokenizer.decode(prefix, False)):
            num_hidden = len(prefix)
    if not logprobs:
        return Delta(text, tuple(token_ids))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, starts_text=True)
    entries, num_characters = [], 0
    for index, (token_id, reported) in enumerate(zip(token_ids, logprobs, strict=True)):
        offset = min(num_characters + detokenizer.starts_at(token_id), len(text))
        if index >= num_hidden:
            num_characters += len(detokenizer.push(token_id))
        if reported is None:
            entries.append(LogprobEntry(_token(tokenizer, token_id, None), None, (), offset))
        else:
            entries.append(_entry(tokenizer, reported, offset))
    return Delta(text, tuple(token_ids), tuple(entries))


def _entry(tokenizer: Tokenizer, reported: TokenLogprobs, text_offset: int) -> LogprobEntry:
    token = _token(tokenizer, reported.token_id, reported.logprob)
    top = tuple([_token(tokenizer, token_id, logprob) for token_id, logprob in reported.top])
    return LogprobEntry(token, reported.rank, top, text_offset)


def _token(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> ReportedToken:
    return ReportedToken(token_id, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), logprob)
