"""One OpenTelemetry trace a request: what happened to it, from its first byte to its last.

    POST /v1/chat/completions                        the caller's span is its parent (W3C traceparent)
    ├─ receive        the body arrives
    ├─ validate       fields, limits, admission
    ├─ tokenise       template and tokenizer
    ├─ queue          submitted, and no step has run any of it
    ├─ prefill        from that step to the first token; a span within for each chunk of the prompt
    ├─ decode         the other tokens, as one span: events at 1, 2, 4, 8 … tokens, at preemptions and returns
    ├─ detokenise     from the first token to the last; the time it really took is an attribute
    └─ send           from the first byte of the answer to the last; likewise

While a request runs only times are noted; spans are made of them at its end. The only importer of OpenTelemetry, and
only where it is switched on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.types import StepStats
from engine.wire import StepBegun
from server.settings import Settings, SettingsProblem
from server.version import version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span

Attributes = dict[str, Any]
_EXPORT_SECONDS = 3.0  # for a batch, retries too: so long may a collector that is gone keep the server from its end
_CONTEXT_HEADERS = frozenset({b"traceparent", b"tracestate"})


@dataclass(slots=True)
class Stretch:
    """Something that happens bit by bit: from its first begin to its last end, so long in all."""

    begin: float = 0.0
    end: float = 0.0
    busy_seconds: float = 0.0
    count: int = 0

    def add(self, begin: float, end: float) -> None:
        """One more bit of it, by time.monotonic()."""
        if not self.count:
            self.begin = begin
        self.end = end
        self.busy_seconds += end - begin
        self.count += 1


@dataclass(slots=True, eq=False)
class PromptCourse:
    """How one prompt of a request fares; times by time.monotonic()."""

    num_prompt_tokens: int
    submitted_at: float
    chunks: list[tuple[float, float, int]] = field(default_factory=list)  # begin, end, tokens
    events: list[tuple[str, float]] = field(default_factory=list)
    num_tokens: int = 0  # of its answers, so far
    left_at: dict[int, float] = field(default_factory=dict)  # choice → when a step no longer had it
    begun_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_cached_tokens: int = 0

    def tokens(self, num_tokens: int, now: float) -> None:
        """So many have arrived; the decode span notes when their number doubles."""
        before, self.num_tokens = self.num_tokens, self.num_tokens + num_tokens
        if before.bit_length() != self.num_tokens.bit_length():
            self.events.append((f"{1 << (self.num_tokens.bit_length() - 1)} tokens", now))

    def prefill_chunks(self) -> list[tuple[float, float, int]]:
        """Of the noted steps those that computed the prompt."""
        left, chunks = self.num_prompt_tokens - self.num_cached_tokens, []
        for chunk in self.chunks:
            if left <= 0:
                break
            chunks.append(chunk)
            left -= chunk[2]
        return chunks


class RequestTrace:
    """The times of one request that is traced, and the root span."""

    def __init__(self, tracing: Tracing, root: Span, arrived: float) -> None:
        self._tracing = tracing
        self._root = root
        self._arrived = arrived
        self._epoch = time.time() - time.monotonic()  # what makes monotonic times times of day
        self._courses: dict[int, PromptCourse] = {}
        self.attributes: Attributes = {}
        self.received: float | None = None  # the body is there
        self.planning: float | None = None  # all checks that need no tokens are passed
        self.tokenized: float | None = None
        self.detokenise = Stretch()
        self.send = Stretch()
        context = root.get_span_context()
        self.exemplar = {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    def submitted(self, request_ids: Sequence[int], num_prompt_tokens: Sequence[int], now: float) -> None:
        """The engine has it: from now on the steps that run it are noted. A batch is submitted part by part."""
        counted = zip(request_ids, num_prompt_tokens, strict=True)
        added = {request_id: PromptCourse(count, now) for request_id, count in counted}
        self._courses |= added
        self._tracing.watch(added)

    def count(self, name: str, number: int) -> None:
        """Add to an attribute: the parts of a batch share a trace."""
        self.attributes[name] = self.attributes.get(name, 0) + number

    def course(self, request_id: int) -> PromptCourse:
        """Of one submitted prompt."""
        return self._courses[request_id]

    def finish(self, method: str, route: str, status: int, ended: float) -> None:
        """Make the spans and hand them over."""
        self._tracing.unwatch(self._courses)
        root = self._root
        root.update_name(f"{method} {route}")
        about: Attributes = {"http.request.method": method, "http.route": route, "http.response.status_code": status}
        root.set_attributes(about | self.attributes)
        if status >= 500:
            root.set_attribute("error.type", str(status))
            root.set_status(self._tracing.error_status)
        stages = (self._arrived, self.received, self.planning, self.tokenized)
        for name, begin, end in zip(("receive", "validate", "tokenise"), stages, stages[1:], strict=False):
            if begin is not None and end is not None:
                self._span(name, begin, end)
        for index, course in enumerate(self._courses.values()):
            self._trace_course(course, {"octavo.prompt": index} if len(self._courses) > 1 else {})
        for name, stretch in (("detokenise", self.detokenise), ("send", self.send)):
            if stretch.count:
                about = {"octavo.busy_seconds": stretch.busy_seconds, "octavo.count": stretch.count}
                self._span(name, stretch.begin, stretch.end, about)
        root.end(self._nanoseconds(ended))

    def _trace_course(self, course: PromptCourse, about: Attributes) -> None:
        if course.begun_at is None:
            return
        # the engine's own clock, where its step has been told: news of the begin may be read late
        begun_at = course.chunks[0][0] if course.chunks else course.begun_at
        self._span("queue", course.submitted_at, begun_at, about)
        if course.first_token_at is None:
            return
        tokens = {
            "octavo.prompt_tokens": course.num_prompt_tokens,
            "octavo.cached_tokens": course.num_cached_tokens,
        }
        prefill = self._open("prefill", begun_at, self._root, about | tokens)
        for begin, end, num_tokens in course.prefill_chunks():
            chunk = self._open("prefill chunk", begin, prefill, {"octavo.tokens": num_tokens})
            chunk.end(self._nanoseconds(end))
        prefill.end(self._nanoseconds(course.first_token_at))
        decode = self._open("decode", course.first_token_at, self._root, about | {"octavo.tokens": course.num_tokens})
        for name, at in course.events:
            decode.add_event(name, timestamp=self._nanoseconds(at))
        decode.end(self._nanoseconds(course.last_token_at))

    def _span(self, name: str, begin: float, end: float, about: Attributes | None = None) -> None:
        self._open(name, begin, self._root, about or {}).end(self._nanoseconds(end))

    def _open(self, name: str, begin: float, parent: Span, about: Attributes) -> Span:
        return self._tracing.child(name, self._nanoseconds(begin), parent, about)

    def _nanoseconds(self, monotonic: float) -> int:
        return int((monotonic + self._epoch) * 1e9)


class Tracing:
    """Traces of a server's requests; lives on its event loop, exports in a thread."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace import Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("octavo", version())
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace
        self.error_status = Status(StatusCode.ERROR)
        self._watched: dict[int, PromptCourse] = {}

    @classmethod
    def from_settings(cls, settings: Settings) -> Tracing | None:
        """None where tracing is off. Raises SettingsProblem where its packages are missing."""
        if settings.otlp_endpoint is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise SettingsProblem(f"--otlp-endpoint needs pip install 'octavo[tracing]' ({error})") from error
        exporter = OTLPSpanExporter(settings.otlp_endpoint.rstrip("/") + "/v1/traces", timeout=_EXPORT_SECONDS)
        return cls(_provider(settings.trace_sample_ratio, BatchSpanProcessor(exporter)))

    def open(self, headers: Iterable[tuple[bytes, bytes]], arrived: float) -> RequestTrace | None:
        """The trace of a request that has just arrived, under the caller's; None if it is not sampled."""
        carrier = {str(name, "latin-1"): str(value, "latin-1") for name, value in headers if name in _CONTEXT_HEADERS}
        root = self._tracer.start_span(
            "request",
            self._propagator.extract(carrier),
            self._trace.SpanKind.SERVER,
            start_time=int((arrived + time.time() - time.monotonic()) * 1e9),
        )
        return RequestTrace(self, root, arrived) if root.is_recording() else None

    def child(self, name: str, begin_nanoseconds: int, parent: Span, about: Attributes) -> Span:
        """A span below another one."""
        context = self._trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context, attributes=about, start_time=begin_nanoseconds)

    # Steps

    def watch(self, courses: Mapping[int, PromptCourse]) -> None:
        """Note the steps that run these, by the engine's ids."""
        self._watched.update(courses)

    def unwatch(self, courses: Mapping[int, PromptCourse]) -> None:
        for request_id in courses:
            self._watched.pop(request_id, None)

    def note_step(self, stats: StepStats, begun: StepBegun) -> None:
        """After every step; the first choice of a request stands for its prompt."""
        if not self._watched:
            return
        begin = stats.started_at + stats.schedule_seconds
        end = begin + stats.execute_seconds
        for (request_id, choice), num_tokens in zip(begun.seq_ids, begun.num_tokens, strict=True):
            course = self._watched.get(request_id)
            if course is not None and not choice and len(course.chunks) < course.num_prompt_tokens:
                course.chunks.append((begin, end, num_tokens))
        for request_id, choice in begun.forgotten:  # ended or preempted: it will be seen whether it comes back
            if (course := self._watched.get(request_id)) is not None:
                course.left_at[choice] = begin
        for request_id, choice in begun.admitted:
            course = self._watched.get(request_id)
            if course is not None and choice in course.left_at:
                course.events += [("preempted", course.left_at.pop(choice)), ("resumed", begin)]

    def close(self) -> None:
        """Export what is left; may take some seconds where nobody answers."""
        self._provider.shutdown()


def _provider(sample_ratio: float, processor: SpanProcessor) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    resource = Resource.create({"service.name": "octavo", "service.version": version()})
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(sample_ratio), resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider
