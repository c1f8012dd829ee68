"""What Octavo exports to Prometheus, recorded. The only importer of prometheus_client.

Counts and latencies are recorded where they happen, the parts of each step as its statistics arrive; the rest of what
the engine knows is read when somebody scrapes. Which metrics there are is the catalogue's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.types import EngineInfo, StepStats
from monitoring.accelerator import Accelerators
from monitoring.catalogue import PREFIX, SPECS, Spec
from monitoring.engine_state import EngineLife, Sample, Totals, samples

PHASES = ("schedule", "prepare", "forward", "sample", "update", "publish", "gap")
Exemplar = dict[str, str]  # the labels that lead from an observation to its trace
_Recorded = TypeVar("_Recorded", Counter, Gauge, Histogram)
_READ_AT_SCRAPES = frozenset(
    {sample.name for sample in samples(None, Totals(), EngineLife())}
    | {"kv_blocks", "host_kv_blocks", "expert_tokens"}
    | {spec.name for spec in SPECS if spec.name.startswith("accelerator_")}
)


class Metrics:
    """One registry with its metrics.

    `latest_step` gives the engine's last StepStats, None while there is no engine; `engine_life` says what is known
    about its processes.
    """

    def __init__(
        self,
        version: str,
        latest_step: Callable[[], StepStats | None],
        engine_life: Callable[[], EngineLife] = EngineLife,
        accelerators: Accelerators | None = None,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside each counter and histogram, which nothing here needs
        self.registry = CollectorRegistry()
        self._metrics = {spec.name: self._make(spec) for spec in SPECS if spec.name not in _READ_AT_SCRAPES}
        self._totals = Totals()
        self.registry.register(
            _EngineCollector(latest_step, engine_life, self._totals, accelerators or Accelerators.detect())
        )
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        ProcessCollector(PREFIX + "engine", lambda: engine_life().pid or "none", registry=self.registry)
        self._gauge("build_info").labels(version).set(1)
        self._bind()

    def _make(self, spec: Spec) -> Counter | Gauge | Histogram:
        name = PREFIX + spec.name
        match spec.kind:
            case "counter":
                return Counter(name, spec.text, spec.labels, registry=self.registry)
            case "gauge":
                return Gauge(name, spec.text, spec.labels, registry=self.registry)
            case "histogram":
                return Histogram(name, spec.text, spec.labels, registry=self.registry, buckets=spec.buckets)

    def _bind(self) -> None:
        """Look up once what is recorded for every token and every step."""
        self._inter_token = self._histogram("inter_token_seconds")
        self._generation_tokens = self._counter("generation_tokens")
        phases = self._histogram("step_phase_seconds")
        self._phases = [phases.labels(phase) for phase in PHASES]
        self._step_sequences = self._histogram("step_sequences")
        self._step_tokens = self._histogram("step_tokens")
        computed = self._counter("computed_tokens")
        self._prefill_tokens, self._decode_tokens = computed.labels("prefill"), computed.labels("decode")

    def _of(self, name: str, kind: type[_Recorded]) -> _Recorded:
        metric = self._metrics[name]
        if not isinstance(metric, kind):
            raise TypeError(f"{name} is no {kind.__name__}")
        return metric

    def _counter(self, name: str) -> Counter:
        return self._of(name, Counter)

    def _gauge(self, name: str) -> Gauge:
        return self._of(name, Gauge)

    def _histogram(self, name: str) -> Histogram:
        return self._of(name, Histogram)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics, which alone has exemplars, if the header asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    # --- server ------------------------------------------------------------------------------------------------------

    def expect(self, routes: Iterable[str], refusals: Iterable[str], aborts: Iterable[str]) -> None:
        """Series that exist from the start: a rate needs the zero before the first event, and none is made later."""
        for route in routes:
            self._histogram("http_request_duration_seconds").labels(route)
        for reason in refusals:
            self._counter("refusals").labels(reason)
        for cause in aborts:
            self._counter("aborts").labels(cause)
        for reason in ("stop", "length", "abort", "timeout", "error"):
            self._counter("requests_finished").labels(reason)

    def model_ready(self, model: str, info: EngineInfo) -> None:
        self._gauge("model_info").clear()
        self._gauge("model_info").labels(
            model, info.architecture, info.device, info.kernels, info.dtype, info.kv_cache_dtype, info.quantization
        ).set(1)
        self._gauge("kv_capacity_tokens").set(info.kv_capacity_tokens)
        self._gauge("kv_cache_bytes").set(info.kv_cache_bytes)
        self._gauge("host_kv_cache_bytes").set(info.host_kv_cache_bytes)
        self._gauge("weight_bytes").set(info.weight_bytes)
        self._gauge("max_step_sequences").set(info.max_num_seqs)
        self._gauge("max_step_tokens").set(info.max_num_batched_tokens)

    def set_ready(self, ready: bool) -> None:
        self._gauge("ready").set(ready)

    def http_answered(
        self, method: str, route: str, code: int, seconds: float, exemplar: Exemplar | None = None
    ) -> None:
        """`route` is a route's template or one fixed word for paths that match none."""
        self._counter("http_requests").labels(method, route, str(code)).inc()
        self._histogram("http_request_duration_seconds").labels(route).observe(seconds, exemplar)

    def loop_lagged(self, seconds: float) -> None:
        self._histogram("event_loop_lag_seconds").observe(seconds)

    def refused(self, reason: str) -> None:
        self._counter("refusals").labels(reason).inc()

    # --- requests ----------------------------------------------------------------------------------------------------

    def prompt_taken(self, num_tokens: int) -> None:
        self._counter("prompt_tokens").inc(num_tokens)
        self._histogram("request_prompt_tokens").observe(num_tokens)

    def prefix_hit(self, num_tokens: int) -> None:
        self._counter("cached_prompt_tokens").inc(num_tokens)

    def tokenized(self, seconds: float, exemplar: Exemplar | None = None) -> None:
        self._histogram("request_tokenize_seconds").observe(seconds, exemplar)

    def first_token(self, seconds: float, exemplar: Exemplar | None = None) -> None:
        self._histogram("time_to_first_token_seconds").observe(seconds, exemplar)

    def tokens_delivered(self, num_tokens: int) -> None:
        self._generation_tokens.inc(num_tokens)

    def tokens_discarded(self, num_tokens: int) -> None:
        self._counter("discarded_tokens").inc(num_tokens)

    def next_tokens(self, num_tokens: int, seconds: float, exemplar: Exemplar | None = None) -> None:
        """`num_tokens` arrived at once, so long after those before them: each took its share of the time."""
        for _ in range(num_tokens):
            self._inter_token.observe(seconds / num_tokens, exemplar)

    def choice_finished(self, reason: str, num_tokens: int) -> None:
        self._counter("requests_finished").labels(reason).inc()
        self._histogram("request_generation_tokens").observe(num_tokens)

    def choice_aborted(self, cause: str) -> None:
        self._counter("aborts").labels(cause).inc()

    def waited(self, seconds: float, exemplar: Exemplar | None = None) -> None:
        self._histogram("request_queue_seconds").observe(seconds, exemplar)

    def prefilled(self, seconds: float, exemplar: Exemplar | None = None) -> None:
        self._histogram("request_prefill_seconds").observe(seconds, exemplar)

    def decoded(self, seconds: float, exemplar: Exemplar | None = None) -> None:
        self._histogram("request_decode_seconds").observe(seconds, exemplar)

    def request_finished(self, seconds: float, exemplar: Exemplar | None = None) -> None:
        self._histogram("request_duration_seconds").observe(seconds, exemplar)

    def request_was_slow(self) -> None:
        self._counter("slow_requests").inc()

    # --- steps -------------------------------------------------------------------------------------------------------

    def step_done(self, stats: StepStats, num_sequences: int, restarts: int) -> None:
        """After every step; `restarts` of the engine so far."""
        self._totals.note(stats, restarts)
        for phase, seconds in zip(self._phases, _phase_seconds(stats), strict=True):
            phase.observe(seconds)
        for kernel, seconds in stats.kernel_seconds:
            self._counter("sampled_kernel_seconds").labels(kernel).inc(seconds)
        self._step_sequences.observe(num_sequences)
        self._step_tokens.observe(stats.num_prefill_tokens + stats.num_decode_tokens)
        self._prefill_tokens.inc(stats.num_prefill_tokens)
        self._decode_tokens.inc(stats.num_decode_tokens)


def _phase_seconds(stats: StepStats) -> tuple[float, ...]:
    """In the order of PHASES."""
    prepare = max(0.0, stats.execute_seconds - stats.forward_seconds - stats.sample_seconds)
    return (
        stats.schedule_seconds,
        prepare,
        stats.forward_seconds,
        stats.sample_seconds,
        stats.update_seconds,
        stats.publish_seconds,
        stats.gap_seconds,
    )


class _EngineCollector(Collector):
    """What is read when somebody scrapes."""

    def __init__(
        self,
        latest_step: Callable[[], StepStats | None],
        engine_life: Callable[[], EngineLife],
        totals: Totals,
        accelerators: Accelerators,
    ) -> None:
        self._latest_step = latest_step
        self._engine_life = engine_life
        self._totals = totals
        self._accelerators = accelerators

    def describe(self) -> Iterable[Metric]:
        return ()  # the names are the catalogue's; registering needs no scrape

    def collect(self) -> Iterable[Metric]:
        stats, life = self._latest_step(), self._engine_life()
        if stats is not None:
            self._totals.note(stats, life.restarts)
        values: dict[str, list[Sample]] = {}
        found = samples(stats, self._totals, life)
        for sample in (*found, *self._accelerators.samples()):
            values.setdefault(sample.name, []).append(sample)
        for spec in SPECS:
            if spec.name in _READ_AT_SCRAPES:
                family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
                metric = family(PREFIX + spec.name, spec.text, labels=spec.labels)
                for sample in values.get(spec.name, ()):
                    metric.add_metric(sample.labels, sample.value)
                yield metric
