"""Everything Octavo exports to Prometheus. The only importer of prometheus_client.

Counts and latencies are recorded where they happen; what the engine knows is read from its latest step when somebody
scrapes, so a step costs nothing. Labels are bounded: route templates, reasons, states; never a raw path or a user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.types import EngineInfo, StepStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5),
    *(10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """One registry with its metrics. `latest_step` gives the engine's last StepStats, None before the first."""

    def __init__(self, version: str, latest_step: Callable[[], StepStats | None]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._create_http_metrics()
        self._create_request_metrics()
        self._build = self._gauge("build_info", "Version of Octavo; always 1.", ("version",))
        self._build.labels(version).set(1)
        self._model = self._gauge(
            "model_info",
            "What is served and how; always 1.",
            ("model", "architecture", "device", "kernels", "dtype", "kv_cache_dtype", "quantization"),
        )
        self._kv_capacity = self._gauge("kv_capacity_tokens", "Tokens that the KV cache can hold.")
        self._ready = self._gauge("ready", "1 when requests can be served, as /ready says.")
        self.registry.register(_StepCollector(latest_step))

    def _create_http_metrics(self) -> None:
        self._http_requests = self._counter(
            "http_requests", "HTTP requests answered, by route template.", ("method", "route", "code")
        )
        self._http_seconds = self._histogram(
            "http_request_duration_seconds", "From the request's arrival to the last byte of its answer.", ("route",)
        )
        self._loop_lag = self._histogram(
            "event_loop_lag_seconds", "How late the server's event loop was, sampled ten times a second."
        )
        self._refusals = self._counter("refusals", "Requests refused before any work was done.", ("reason",))

    def _create_request_metrics(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts taken in.")
        self._cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens that the prefix cache had.")
        self._generated_tokens = self._counter("generation_tokens", "Tokens delivered in answers.")
        self._discarded_tokens = self._counter(
            "discarded_tokens", "Tokens that arrived after a stop string had ended their choice."
        )
        self._finished = self._counter("requests_finished", "Choices that ended, by reason.", ("reason",))
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token."
        )
        self._inter_token = self._histogram("inter_token_seconds", "Between one token of a choice and the next.")
        self._request_seconds = self._histogram(
            "request_duration_seconds", "From the request's arrival to its last token."
        )
        self._prompt_length = self._histogram("request_prompt_tokens", "Length of prompts.", buckets=_TOKENS)
        self._answer_length = self._histogram("request_generation_tokens", "Length of answers.", buckets=_TOKENS)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"octavo_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"octavo_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = _SECONDS
    ) -> Histogram:
        return Histogram(f"octavo_{name}", text, labels, registry=self.registry, buckets=buckets)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def model_ready(self, model: str, info: EngineInfo) -> None:
        self._model.clear()
        self._model.labels(
            model, info.architecture, info.device, info.kernels, info.dtype, info.kv_cache_dtype, info.quantization
        ).set(1)
        self._kv_capacity.set(info.kv_capacity_tokens)

    def set_ready(self, ready: bool) -> None:
        self._ready.set(ready)

    def http_answered(self, method: str, route: str, code: int, seconds: float) -> None:
        """`route` is a route's template or one fixed word for paths that match none."""
        self._http_requests.labels(method, route, str(code)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def loop_lagged(self, seconds: float) -> None:
        self._loop_lag.observe(seconds)

    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def prompt_taken(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)
        self._prompt_length.observe(num_tokens)

    def prefix_hit(self, num_tokens: int) -> None:
        self._cached_tokens.inc(num_tokens)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def tokens_delivered(self, num_tokens: int) -> None:
        self._generated_tokens.inc(num_tokens)

    def tokens_discarded(self, num_tokens: int) -> None:
        self._discarded_tokens.inc(num_tokens)

    def next_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def choice_finished(self, reason: str, num_tokens: int) -> None:
        self._finished.labels(reason).inc()
        self._answer_length.observe(num_tokens)

    def request_finished(self, seconds: float) -> None:
        self._request_seconds.observe(seconds)


class _StepCollector(Collector):
    """The engine's state as of its latest step, turned into metrics when scraped."""

    _GAUGES = (
        ("requests_running", "num_running", "Sequences being computed."),
        ("requests_waiting", "num_waiting", "Sequences waiting for their turn."),
        ("step_prefill_tokens", "num_prefill_tokens", "Prompt tokens in the latest step."),
        ("step_decode_tokens", "num_decode_tokens", "Answer tokens in the latest step."),
        ("kv_wasted_slots", "num_wasted_slots", "Slots of live KV blocks that hold no token."),
        ("oldest_waiting_steps", "oldest_waiting_steps", "Steps that the head of the queue has waited."),
        ("step_schedule_seconds", "schedule_seconds", "Scheduling in the latest step."),
        ("step_execute_seconds", "execute_seconds", "Computing in the latest step."),
        ("step_update_seconds", "update_seconds", "Bookkeeping in the latest step."),
    )
    _COUNTERS = (
        ("prefix_query_tokens", "prefix_query_tokens_total", "Prompt tokens looked up in the prefix cache."),
        ("prefix_hit_tokens", "prefix_hit_tokens_total", "Prompt tokens found in the prefix cache."),
        ("evicted_blocks", "evicted_blocks_total", "Cached KV blocks reclaimed."),
        ("preemptions", "preemptions_total", "Times a running sequence gave up its KV."),
        ("preempted_tokens", "preempted_tokens_total", "Computed tokens given up."),
        ("overrun_tokens", "overrun_tokens_total", "Tokens sampled for choices that had ended."),
        ("engine_steps", "step_id", "Steps since the engine started."),
    )

    def __init__(self, latest_step: Callable[[], StepStats | None]) -> None:
        self._latest_step = latest_step

    def describe(self) -> Iterable[Metric]:
        return ()  # names are fixed above; registering needs no scrape

    def collect(self) -> Iterable[Metric]:
        step = self._latest_step()
        for name, field, text in self._GAUGES:
            yield GaugeMetricFamily(f"octavo_{name}", text, value=getattr(step, field, 0))
        for name, field, text in self._COUNTERS:
            yield CounterMetricFamily(f"octavo_{name}", text, value=getattr(step, field, 0))
        blocks = GaugeMetricFamily("octavo_kv_blocks", "KV blocks by state.", labels=("group", "state"))
        for group, stats in enumerate(step.kv_groups if step else ()):
            for state in ("free", "private", "shared", "cached"):
                blocks.add_metric((str(group), state), getattr(stats, state))
        yield blocks
