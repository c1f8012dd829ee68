"""How a request to any generating endpoint is run: checks, admission, tokens, engine, answer.

Everything happens inside one generator or one coroutine per request, so that leaving it at any point (an error, a
client that goes away) undoes admission and aborts the engine's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive

from server.door import Call, ClientGone
from server.errors import InvalidRequest
from server.generation import Answer, Generation, Part
from server.plan import ModelText, Plan
from server.protocol.common import ModelRequest, RequestModel
from server.sse import EventStream
from server.state import Running, ServedModel, Server
from server.translate.parts import ResponseHead, Timings
from server.translate.sampling import SeedSource

Result = TypeVar("Result")
OFFLOAD_CHARS = 16_384  # longer inputs are tokenised in a thread: this much takes about 5 ms


class Writer(Protocol):
    """The wire form of one request's answers."""

    def part(self, part: Part) -> bytes:
        """Whole SSE events for a part."""

    def closing(self, timings: Timings) -> bytes:
        """Whole SSE events after the last part."""

    def response(self, answers: list[Answer], timings: Timings) -> bytes:
        """The JSON of an answer that is not streamed."""


class Job(Protocol):
    """One request to a generating endpoint: pure, knows its own wire shapes."""

    id_prefix: ClassVar[str]  # of the response's id, e.g. "chatcmpl-"
    starts_text: ClassVar[bool]  # answers are texts of their own, not the prompt's continuation

    @property
    def body(self) -> ModelRequest:
        """The request."""

    @property
    def request_id(self) -> str | None:
        """The id that it wants for its response."""

    def num_choices(self) -> int:
        """Choices that it asks the engine for."""

    def num_chars(self) -> int:
        """About how much text has to be tokenised."""

    def plan(self, model: ModelText, draw_seed: SeedSource) -> Plan:
        """Raises InvalidRequest."""

    def text_offsets(self, plan: Plan, model: ModelText) -> list[int]:
        """Per prompt: characters of an echo before the answer; [] without echo."""

    def writer(self, head: ResponseHead, generation: Generation) -> Writer:
        """For the answers of this request."""

    def error_event(self, error: Exception, writer: object) -> bytes:
        """The event that tells of an error after the response has begun; `writer` None if it came before one."""


@dataclass(frozen=True)
class _Run:
    """A job under way."""

    generation: Generation
    writer: Writer
    ids: tuple[str, ...]
    arrived: float
    tokenized: float

    def timings(self) -> Timings:
        """Up to now."""
        first = self.generation.first_token_at
        return Timings(
            self.tokenized - self.arrived,
            None if first is None else first - self.arrived,
            time.monotonic() - self.arrived,
        )


@dataclass(frozen=True)
class Work:
    """A job with what it runs on."""

    server: Server
    call: Call
    job: Job

    def stream(self) -> Response:
        """The answer as events."""
        settings = self.server.settings
        writers: list[Writer] = []
        return EventStream(
            self._events(writers),
            comment_seconds=settings.stream_comment_seconds,
            slow_reader_seconds=settings.slow_reader_seconds,
            on_error=lambda error: self._error_event(error, writers[0] if writers else None),
        )

    def _error_event(self, error: Exception, writer: object) -> bytes:
        self.call.facts["error"] = str(error)[:300]
        return self.job.error_event(error, writer)

    async def answer(self, request: Request) -> Response:
        """The answer as one response. Raises ClientGone when there is nobody left to read it."""
        return Response(await until_disconnect(request.receive, self.whole()), media_type="application/json")

    async def _events(self, writers: list[Writer]) -> AsyncGenerator[bytes]:
        """Puts the writer into `writers` once there is one."""
        with self._admitted() as model:
            run = await self._start(model)
            writers.append(run.writer)
            with self._abortable(run):
                async with contextlib.aclosing(run.generation.parts()) as parts:
                    async for part in parts:
                        if data := run.writer.part(part):
                            yield data
            if data := run.writer.closing(run.timings()):
                yield data

    async def whole(self) -> bytes:
        """The JSON of the answer."""
        with self._admitted() as model:
            run = await self._start(model)
            with self._abortable(run):
                answers = await run.generation.answers()
            self.call.headers["server-timing"] = run.timings().header()
            self._note_limits()
            return run.writer.response(answers, run.timings())

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[ServedModel]:
        """The model, for a request that passed all checks that need no tokens."""
        model = self.server.model_named(self.job.body.model)
        note_unknown_fields(self.job.body, self.call, strict=self.server.settings.strict_fields)
        self._note_limits()
        with self.server.admission.enter(self.call.key, self.job.num_choices()):
            self._note_limits()
            yield model

    async def _start(self, model: ServedModel) -> _Run:
        """Tokenise, and make ready to run."""
        job, server, trace = self.job, self.server, self.call.trace
        if trace is not None and trace.planning is None:
            trace.planning = time.monotonic()
        plan = await offload(job.num_chars(), lambda: job.plan(model.text, lambda: secrets.randbits(64)))
        if plan.constraint is not None:
            await model.text.grammars.check(plan.constraint)
        tokenized = time.monotonic()
        server.metrics.tokenized(tokenized - self.call.arrived, None if trace is None else trace.exemplar)
        limits = [limit for limit in (plan.timeout_seconds, server.settings.request_timeout_seconds) if limit]
        generation = Generation(
            engine=model.engine,
            tokenizer=model.text.tokenizer,
            plan=plan,
            metrics=server.metrics,
            arrived=self.call.arrived,
            starts_text=job.starts_text,
            charge=lambda num_tokens: server.admission.charge_tokens(self.call.key, num_tokens),
            tenant=server.keys.tenant(self.call.key),
            trace=trace,
            timeout_seconds=min(limits, default=None),
            text_offsets=job.text_offsets(plan, model.text),
        )
        head = ResponseHead(
            id=job.id_prefix + (job.request_id or uuid.uuid4().hex),
            created=int(time.time()),
            model=job.body.model or model.names[0],
            fingerprint=model.fingerprint,
        )
        if trace is not None:
            trace.tokenized = tokenized
            trace.attributes |= _attributes(job, head, plan)
        self.call.headers["server-timing"] = f"tokenize;dur={(tokenized - self.call.arrived) * 1e3:.1f}"
        ids = (head.id, self.call.id)
        return _Run(generation, job.writer(head, generation), ids, self.call.arrived, tokenized)

    @contextlib.contextmanager
    def _abortable(self, run: _Run) -> Iterator[None]:
        """While the block runs it can be aborted; at its end the log gets to know what came of it."""
        try:
            with self.server.abortable(run.ids, Running(self.call.key, run.generation)):
                yield
        finally:
            if facts := run.generation.facts():
                self.call.facts |= {"id": run.ids[0], **self._asked(run), **facts}

    def _asked(self, run: _Run) -> dict[str, object]:
        """The text of the prompts, where the operator wants it logged."""
        if not self.server.settings.log_prompts:
            return {}
        generation = run.generation
        return {"prompts": [generation.tokenizer.decode(p.token_ids, False) for p in generation.plan.prompts]}

    def _note_limits(self) -> None:
        self.call.headers |= self.server.admission.headers(self.call.key)


def _attributes(job: Job, head: ResponseHead, plan: Plan) -> dict[str, object]:
    """What a trace says of a request, by OpenTelemetry's conventions for generative AI; no text."""
    operation = "text_completion" if not job.starts_text else "chat"
    if plan.pooling is not None:
        operation = "embeddings"
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": head.model,
        "gen_ai.request.max_tokens": max(prompt.max_tokens for prompt in plan.prompts),
        "gen_ai.request.temperature": plan.sampling.temperature,
        "gen_ai.request.top_p": plan.sampling.top_p,
        "gen_ai.request.top_k": plan.sampling.top_k,
        "gen_ai.request.presence_penalty": plan.sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": plan.sampling.frequency_penalty,
        "gen_ai.request.choice.count": plan.num_choices,
        "gen_ai.request.stream": bool(getattr(job.body, "stream", False)),
        "gen_ai.response.id": head.id,
        "gen_ai.response.model": head.model,
        "octavo.fingerprint": head.fingerprint,
    }


def note_unknown_fields(body: RequestModel, call: Call, *, strict: bool) -> None:
    """Name the fields that the request has and the API has not: in a header, or in a refusal."""
    if not body.model_extra:
        return
    unknown = sorted(body.model_extra)
    if strict:
        raise InvalidRequest(f"Unknown field: {', '.join(unknown)[:500]}", param=unknown[0][:100])
    printable = [name for name in unknown if name.isascii() and name.isprintable()]
    call.headers["x-ignored-fields"] = ", ".join(printable)[:500]


async def offload(num_chars: int, work: Callable[[], Result]) -> Result:
    """Do this here if it is short, else in a thread, so that the event loop stays free."""
    return work() if num_chars <= OFFLOAD_CHARS else await asyncio.to_thread(work)


async def until_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of the work, which is cancelled if the client disconnects. Raises ClientGone then."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
