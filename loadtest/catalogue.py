"""The measures that tables, comparisons and plots speak of: name, unit, direction, where to find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadtest.report import RunReport
from loadtest.summary import Distribution, Interference


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a run. `scale` turns the stored unit (seconds, bytes, shares) into the shown `unit`."""

    name: str
    unit: str
    higher_is_better: bool | None  # None: neither, it only explains
    get: Callable[[RunReport], float | None]
    scale: float = 1.0

    def shown(self, value: float) -> str:
        """The value in the shown unit."""
        return three_digits(value * self.scale)


def three_digits(value: float) -> str:
    """About three digits, never an exponent."""
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}"


def _latency(part: str, statistic: str) -> Callable[[RunReport], float | None]:
    def get(report: RunReport) -> float | None:
        found: Distribution | None = getattr(report.summary.latencies, part)
        return None if found is None else float(getattr(found, statistic))

    return get


def _interference(get: Callable[[Interference], float | None]) -> Callable[[RunReport], float | None]:
    return lambda report: None if report.summary.interference is None else get(report.summary.interference)


def _cached_share(report: RunReport) -> float | None:
    summary = report.summary
    if summary.cached_tokens is None or not summary.input_tokens:
        return None
    return summary.cached_tokens / summary.input_tokens


def _goodput(report: RunReport) -> float | None:
    goodput = report.summary.goodput
    return None if goodput is None else goodput.requests_per_second


def _median(found: Distribution | None) -> float | None:
    return None if found is None else found.p50


def _p99(found: Distribution | None) -> float | None:
    return None if found is None else found.p99


def _max(found: Distribution | None) -> float | None:
    return None if found is None else found.max


_SHOWN = {"ttft": ("p50", "p99"), "gap": ("p50", "p99", "max"), "tpot": ("p50",), "e2e": ("mean", "p50", "p99")}

LATENCY_MEASURES = tuple(
    Measure(f"{part} {statistic}", "ms", False, _latency(part, statistic), 1e3)
    for part, statistics in _SHOWN.items()
    for statistic in statistics
)

MEASURES: tuple[Measure, ...] = (
    Measure("requests/s", "1/s", True, lambda r: r.summary.requests_per_second),
    Measure("output tok/s", "tok/s", True, lambda r: r.summary.output_tokens_per_second),
    Measure("total tok/s", "tok/s", True, lambda r: r.summary.total_tokens_per_second),
    Measure("decode tok/s of a stream", "tok/s", True, lambda r: _median(r.summary.decode_tokens_per_second)),
    Measure("prefill tok/s of a request", "tok/s", True, lambda r: _median(r.summary.prefill_tokens_per_second)),
    *LATENCY_MEASURES,
    Measure("goodput", "1/s", True, _goodput),
    Measure("prompt tokens from cache", "%", True, _cached_share, 100.0),
    Measure("gap p50 before intrusion", "ms", False, _interference(lambda i: _median(i.gap_before)), 1e3),
    Measure("gap p50 during intrusion", "ms", False, _interference(lambda i: _median(i.gap_during)), 1e3),
    Measure("gap p99 during intrusion", "ms", False, _interference(lambda i: _p99(i.gap_during)), 1e3),
    Measure("gap max during intrusion", "ms", False, _interference(lambda i: _max(i.gap_during)), 1e3),
    Measure("intrusion", "s", False, _interference(lambda i: i.intrusion_seconds)),
    Measure("intruders' prefill tok/s", "tok/s", True, _interference(lambda i: i.prefill_tokens_per_second)),
    Measure("in flight max", "", None, lambda r: float(r.summary.in_flight_max)),
    Measure("failed", "", False, lambda r: float(r.summary.num_requests - r.summary.num_ok)),
    Measure("server CPU", "cores", False, lambda r: r.server.cpu_cores),
    Measure("CPU of other processes", "cores", None, lambda r: r.server.foreign_cpu_cores),
    Measure("server peak RSS", "MB", False, lambda r: r.server.peak_rss_bytes, 1e-6),
)
