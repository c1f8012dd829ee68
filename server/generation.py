"""One request in the engine: its updates become the parts of its answers, and everything about it is counted.

`Generation` is protocol-neutral: routes turn its parts into chunks or collect them into whole answers. Closing it, at
whatever point, ends the request in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.errors import EngineDead, RequestRejected
from engine.types import ErrorKind, FinishReason, RequestUpdate, TokenLogprobs
from monitoring.metrics import Metrics
from server.engine_port import EnginePort, UpdateStream
from server.errors import Aborted, ApiError, DeadlineExceeded, EngineFailed
from server.plan import Plan
from server.text.output import ChoiceOutput, LogprobEntry
from server.text.tokenizer import Tokenizer

Finish = Literal["stop", "length"]
_UPDATES_PER_TURN = 4


class Part(NamedTuple):
    """What is new of one choice. `choice` counts prompt by prompt: prompt × draws + draw."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[LogprobEntry, ...]
    finish: Finish | None  # in the choice's last part
    stop: str | None = None  # the stop string that ended it, there


@dataclass(slots=True)
class Answer:
    """One choice as a whole."""

    text: str
    token_ids: list[int]
    logprobs: list[LogprobEntry]
    finish: Finish
    stop: str | None = None  # the stop string that ended it


@dataclass(frozen=True, slots=True)
class Usage:
    """Delivered tokens of a request, all draws together."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class _Choice:
    output: ChoiceOutput
    last_token_at: float | None = None
    ended: bool = False


@dataclass(eq=False)
class Generation:
    """A request from its submission to its end. `parts` may be iterated once.

    `charge` is told the tokens to count against the key's allowance.
    """

    engine: EnginePort
    tokenizer: Tokenizer
    plan: Plan
    metrics: Metrics
    arrived: float  # time.monotonic() of the HTTP request
    starts_text: bool  # answers are texts of their own, not the prompt's continuation
    charge: Callable[[int], None]
    tenant: int = 0
    timeout_seconds: float | None = None  # from its arrival on; None = no limit
    text_offsets: Sequence[int] = ()  # per prompt: characters of an echo before the answer
    prompt_logprobs: list[list[TokenLogprobs | None]] = field(default_factory=list)  # [prompt][position], as known
    embeddings: list[tuple[float, ...]] = field(default_factory=list)  # [prompt]
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        plan = self.plan
        self._request_ids = [self.engine.new_request_id() for _ in plan.prompts]
        self._prompt_of = {request_id: index for index, request_id in enumerate(self._request_ids)}
        self._choices = [
            _Choice(self._new_output(prompt)) for prompt in range(len(plan.prompts)) for _ in range(plan.num_draws)
        ]
        self._num_open = len(self._choices)
        self._cached_tokens: dict[int, int] = {}
        self._abort_error: ApiError | None = None
        self._cut_short = "abort"  # the reason noted for choices that have no end of their own
        self.prompt_logprobs = [[] for _ in plan.prompts]
        self.embeddings = [() for _ in plan.prompts]
        self.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in plan.prompts)

    def _new_output(self, prompt: int) -> ChoiceOutput:
        options = self.plan.output
        return ChoiceOutput(
            self.tokenizer,
            stops=options.stop,
            include_stop=options.include_stop,
            min_tokens=self.plan.sampling.min_tokens,
            skip_special_tokens=options.skip_special_tokens,
            starts_text=self.starts_text,
            text_offset=self.text_offsets[prompt] if self.text_offsets else 0,
        )

    @property
    def usage(self) -> Usage:
        """As delivered so far."""
        completion = sum(choice.output.num_tokens for choice in self._choices)
        return Usage(self.num_prompt_tokens, sum(self._cached_tokens.values()), completion)

    def abort(self, error: ApiError) -> None:
        """End it from outside: `parts` raises this error."""
        self._abort_error = error
        for request_id in self._request_ids:
            self.engine.abort(request_id)

    async def parts(self) -> AsyncGenerator[Part]:
        """Parts as they come, until every choice has ended. Raises RequestRejected, EngineUnavailable or ApiError."""
        self.metrics.prompt_taken(self.num_prompt_tokens)
        self.charge(self.num_prompt_tokens)
        try:
            async with (
                contextlib.aclosing(self._submit()) as stream,
                contextlib.aclosing(self._in_time(stream)) as items,
            ):
                async for updates in items:
                    for number, update in enumerate(updates, 1):
                        part = self._take(update)
                        if part is not None:
                            yield part
                        if number % _UPDATES_PER_TURN == 0:
                            await asyncio.sleep(0)  # a backlog must not keep the loop from the others
                    if not self._num_open:
                        break
        finally:
            self._account()

    def _submit(self) -> UpdateStream:
        """The updates of all prompts, as they come."""
        numbered = enumerate(self._request_ids)
        requests = [self.plan.request(index, request_id, self.tenant) for index, request_id in numbered]
        streams = [self.engine.submit(request) for request in requests]
        return streams[0] if len(streams) == 1 else _merge(streams)

    async def _in_time(self, stream: UpdateStream) -> AsyncGenerator[list[RequestUpdate]]:
        """The stream's items. Raises DeadlineExceeded when the time is over, whatever the engine is doing."""
        if self.timeout_seconds is None:
            async for updates in stream:
                yield updates
            return
        items, deadline = aiter(stream), self.arrived + self.timeout_seconds
        while True:
            try:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                async with asyncio.timeout(left):
                    updates = await anext(items)
            except TimeoutError as error:
                self._cut_short = "timeout"
                raise DeadlineExceeded(f"The request took longer than {self.timeout_seconds:g} seconds") from error
            except StopAsyncIteration:
                return
            yield updates

    def _take(self, update: RequestUpdate) -> Part | None:
        """One update; None when it brings nothing to tell."""
        prompt = self._prompt_of[update.request_id]
        index = prompt * self.plan.num_draws + update.choice_index
        choice = self._choices[index]
        if update.finish_reason is FinishReason.ERROR:
            raise _failure(update)
        if prompt not in self._cached_tokens:
            self._cached_tokens[prompt] = update.num_cached_tokens
            self.metrics.prefix_hit(update.num_cached_tokens)
        if update.prompt_logprobs and update.choice_index == 0:
            self.prompt_logprobs[prompt] += update.prompt_logprobs
        if update.embedding:
            self.embeddings[prompt] = update.embedding
        if choice.ended:  # by a stop string: what still comes is overrun
            choice.output.push(update.new_token_ids)
            return None
        if update.finish_reason is FinishReason.ABORT:
            raise self._abort_error or Aborted("The request was aborted")
        if update.new_token_ids:
            self._time_tokens(choice, len(update.new_token_ids))
        return self._push(index, choice, update)

    def _push(self, index: int, choice: _Choice, update: RequestUpdate) -> Part | None:
        delta = choice.output.push(
            update.new_token_ids,
            update.logprobs,
            finished=update.finish_reason is not None,
            stop_token=update.stop_token_id is not None,
        )
        finish: Finish | None = None
        if delta.stop is not None:
            finish = "stop"
            if update.finish_reason is None:
                self.engine.abort(update.request_id, update.choice_index)
        elif update.finish_reason is not None:
            finish = "stop" if update.finish_reason is FinishReason.STOP else "length"
        if delta.token_ids:
            self.metrics.tokens_delivered(len(delta.token_ids))
        if finish is not None:
            choice.ended = True
            self._num_open -= 1
            self.metrics.choice_finished(finish, choice.output.num_tokens)
        elif not delta.text and not (delta.token_ids and self.plan.output.keep_tokens):
            return None
        return Part(index, delta.text, delta.token_ids, delta.logprobs, finish, delta.stop)

    def _time_tokens(self, choice: _Choice, num_tokens: int) -> None:
        now = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = now
            self.metrics.first_token(now - self.arrived)
        if choice.last_token_at is not None:
            self.metrics.next_token((now - choice.last_token_at) / num_tokens)
        choice.last_token_at = now

    def _account(self) -> None:
        """Once, at the end, however it came."""
        for choice in self._choices:
            self.metrics.tokens_discarded(choice.output.num_overrun_tokens)
            if not choice.ended:
                self.metrics.choice_finished(self._cut_short, choice.output.num_tokens)
        self.metrics.request_finished(time.monotonic() - self.arrived)
        self.charge(self.usage.completion_tokens)

    async def answers(self) -> list[Answer]:
        """All choices as wholes, in order. Raises as `parts` does."""
        answers = [Answer("", [], [], "length") for _ in self._choices]
        texts: list[list[str]] = [[] for _ in self._choices]
        async with contextlib.aclosing(self.parts()) as parts:
            async for part in parts:
                answer = answers[part.choice]
                texts[part.choice].append(part.text)
                answer.token_ids += part.token_ids
                answer.logprobs += part.logprobs
                answer.finish = part.finish or answer.finish
                answer.stop = part.stop
        for answer, pieces in zip(answers, texts, strict=True):
            answer.text = "".join(pieces)
        return answers


def _failure(update: RequestUpdate) -> Exception:
    message = update.error or "the engine failed on this request"
    match update.error_kind:
        case ErrorKind.REJECTED:
            return RequestRejected(message)
        case ErrorKind.UNAVAILABLE:
            return EngineDead(message)
    return EngineFailed(message)


async def _merge(streams: Sequence[UpdateStream]) -> AsyncGenerator[list[RequestUpdate]]:
    """The items of all streams as they come; the first exception ends it. All streams are closed at the end."""
    queue: asyncio.Queue[list[RequestUpdate] | Exception | None] = asyncio.Queue()

    async def pump(stream: UpdateStream) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for updates in stream:
                    queue.put_nowait(updates)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
