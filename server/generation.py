"""One request in the engine: its updates become the parts of its answers, and everything about it is counted.

`Generation` is protocol-neutral: routes turn its parts into chunks or collect them into whole answers. Closing it, at
whatever point, ends the request in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
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
from server.tracing import RequestTrace

Finish = Literal["stop", "length"]
UpdateSource = UpdateStream | AsyncGenerator[list[RequestUpdate]]
ABORT_CAUSES = ("disconnect", "request", "deadline", "shutdown")
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
    finish: str | None = None  # why it ended

    @property
    def ended(self) -> bool:
        return self.finish is not None


@dataclass(slots=True)
class _Course:
    """How one prompt fares in the engine, by time.monotonic()."""

    submitted_at: float
    stream: UpdateStream
    first_token_at: float | None = None
    last_token_at: float = 0.0


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
    trace: RequestTrace | None = None
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
        self._courses: list[_Course] = []  # [prompt], once submitted
        self._arrived: deque[RequestUpdate] = deque()  # from the engine, not taken yet
        self._abort_error: ApiError | None = None
        self._cut_short = "abort"  # the reason noted for choices that have no end of their own
        self._cause = "disconnect"  # of an abort: the client has gone, unless we know better
        self._exemplar = None if self.trace is None else self.trace.exemplar
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

    def abort(self, error: ApiError, cause: str) -> None:
        """End it from outside: `parts` raises this error."""
        self._abort_error = error
        self._cause = cause
        for request_id in self._request_ids:
            self.engine.abort(request_id)

    async def parts(self) -> AsyncGenerator[Part]:
        """Parts as they come, until every choice has ended. Raises RequestRejected, EngineUnavailable or ApiError."""
        updates_of_all = self._submit()
        self.metrics.prompt_taken(self.num_prompt_tokens)
        self.charge(self.num_prompt_tokens)
        try:
            async with (
                contextlib.aclosing(updates_of_all) as stream,
                contextlib.aclosing(self._in_time(stream)) as items,
            ):
                async for updates in items:
                    self._arrived.extend(updates)
                    for number in range(1, len(updates) + 1):
                        part = self._take(self._arrived.popleft())
                        if part is not None:
                            yield part
                        if number % _UPDATES_PER_TURN == 0:
                            await asyncio.sleep(0)  # a backlog must not keep the loop from the others
                    if not self._num_open:
                        break
        except Exception:
            if self._cut_short == "abort" and self._abort_error is None:
                self._cut_short = "error"
            raise
        finally:
            self._account()

    def _submit(self) -> UpdateSource:
        """The updates of all prompts, as they come."""
        numbered = enumerate(self._request_ids)
        requests = [self.plan.request(index, request_id, self.tenant) for index, request_id in numbered]
        self._courses = [_Course(time.monotonic(), self.engine.submit(request)) for request in requests]
        if self.trace is not None:
            lengths = [len(prompt.token_ids) for prompt in self.plan.prompts]
            self.trace.submitted(self._request_ids, lengths, self._courses[0].submitted_at)
        streams = [course.stream for course in self._courses]
        return streams[0] if len(streams) == 1 else _merge(streams, self._arrived)

    async def _in_time(self, stream: UpdateSource) -> AsyncGenerator[list[RequestUpdate]]:
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
                self._cut_short, self._cause = "timeout", "deadline"
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
            self._time_tokens(self._courses[prompt], choice, len(update.new_token_ids))
        return self._push(index, choice, update)

    def _push(self, index: int, choice: _Choice, update: RequestUpdate) -> Part | None:
        begin = time.monotonic() if self.trace is not None else 0.0
        delta = choice.output.push(
            update.new_token_ids,
            update.logprobs,
            finished=update.finish_reason is not None,
            stop_token=update.stop_token_id is not None,
        )
        if self.trace is not None:
            self.trace.detokenise.add(begin, time.monotonic())
            self.trace.course(update.request_id).tokens(len(update.new_token_ids), begin)
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
            choice.finish = finish
            self._num_open -= 1
            self.metrics.choice_finished(finish, choice.output.num_tokens)
        elif not delta.text and not (delta.token_ids and self.plan.output.keep_tokens):
            return None
        return Part(index, delta.text, delta.token_ids, delta.logprobs, finish, delta.stop)

    def _time_tokens(self, course: _Course, choice: _Choice, num_tokens: int) -> None:
        now = time.monotonic()
        course.last_token_at = now
        if course.first_token_at is None:
            course.first_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now
            self.metrics.first_token(now - self.arrived, self._exemplar)
        if choice.last_token_at is not None:
            self.metrics.next_tokens(num_tokens, now - choice.last_token_at, self._exemplar)
        choice.last_token_at = now

    def _account(self) -> None:
        """Once, at the end, however it came."""
        self.metrics.tokens_discarded(sum(len(update.new_token_ids) for update in self._arrived))
        for choice in self._choices:
            self.metrics.tokens_discarded(choice.output.num_undelivered)
            if not choice.ended:
                choice.finish = self._cut_short
                self.metrics.choice_finished(choice.finish, choice.output.num_tokens)
                if choice.finish != "error":
                    self.metrics.choice_aborted(self._cause)
        for course in self._courses:
            if (begun_at := course.stream.begun_at) is None:
                continue
            self.metrics.waited(begun_at - course.submitted_at, self._exemplar)
            if course.first_token_at is not None:
                self.metrics.prefilled(course.first_token_at - begun_at, self._exemplar)
                self.metrics.decoded(course.last_token_at - course.first_token_at, self._exemplar)
        self.metrics.request_finished(time.monotonic() - self.arrived, self._exemplar)
        if self.trace is not None:
            self._tell(self.trace)
        self.charge(self.usage.completion_tokens)

    def _tell(self, trace: RequestTrace) -> None:
        """What the trace gets to know at the end."""
        usage = self.usage
        for index, (request_id, course) in enumerate(zip(self._request_ids, self._courses, strict=False)):
            traced = trace.course(request_id)
            traced.begun_at = course.stream.begun_at
            traced.first_token_at, traced.last_token_at = course.first_token_at, course.last_token_at
            traced.num_cached_tokens = self._cached_tokens.get(index, 0)
        trace.count("gen_ai.usage.input_tokens", usage.prompt_tokens)
        trace.count("gen_ai.usage.output_tokens", usage.completion_tokens)
        trace.count("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        trace.attributes["gen_ai.response.finish_reasons"] = [choice.finish or "" for choice in self._choices]

    def facts(self) -> dict[str, object]:
        """For the log, at the end: what was asked, what came of it, how long it took. {} if it never came to run."""
        if not self._courses:
            return {}
        usage = self.usage
        facts: dict[str, object] = {
            "engine_request": self._request_ids[0],
            "choices": len(self._choices),
            "max_tokens": max(prompt.max_tokens for prompt in self.plan.prompts),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "generation_tokens": usage.completion_tokens,
            "finish_reason": ",".join(dict.fromkeys(choice.finish or "" for choice in self._choices)),
        }
        if any(choice.finish in ("abort", "timeout") for choice in self._choices):
            facts["cause"] = self._cause
        first = self._courses[0]
        if (begun_at := first.stream.begun_at) is not None:
            facts["queue_ms"] = _milliseconds(begun_at - first.submitted_at)
        if self.first_token_at is not None:
            facts["first_token_ms"] = _milliseconds(self.first_token_at - self.arrived)
        return facts

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


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def _failure(update: RequestUpdate) -> Exception:
    message = update.error or "the engine failed on this request"
    match update.error_kind:
        case ErrorKind.REJECTED:
            return RequestRejected(message)
        case ErrorKind.UNAVAILABLE:
            return EngineDead(message)
    return EngineFailed(message)


async def _merge(streams: Sequence[UpdateStream], left: deque[RequestUpdate]) -> AsyncGenerator[list[RequestUpdate]]:
    """The items of all streams as they come; the first exception ends it. All streams are closed at the end; what
    nobody took by then goes to `left`."""
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
        while not queue.empty():
            if isinstance(item := queue.get_nowait(), list):
                left.extend(item)
