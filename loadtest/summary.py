"""The figures of a run, as typed data: what report.json holds. Times in seconds, sizes in tokens or bytes.

The names and meanings here are a contract: docs/loadtest.md describes them, and a change of either is a new
schema version.
"""

from __future__ import annotations

from msgspec import Struct


class Distribution(Struct, frozen=True):
    """Order statistics; percentiles by linear interpolation between the two nearest values."""

    count: int
    mean: float
    min: float
    max: float
    p50: float
    p90: float
    p95: float
    p99: float
    percentiles: tuple[float, ...]  # 0, 1, … 100: enough to draw the distribution


class Latencies(Struct, frozen=True):
    """Of the served requests, and of those that were given up waiting, at the time waited so far."""

    ttft: Distribution | None  # scheduled → first text
    gap: Distribution | None  # between successive chunks of text, over all requests
    tpot: Distribution | None  # per request: mean seconds per output token after the first
    e2e: Distribution | None  # scheduled → end


class Objective(Struct, frozen=True):
    """Limits that one request must keep; None = no limit."""

    ttft_seconds: float | None = None
    gap_seconds: float | None = None  # the longest gap
    tpot_seconds: float | None = None
    e2e_seconds: float | None = None


class Goodput(Struct, frozen=True):
    """How much was served within the objective. Failures count as misses."""

    objective: Objective
    num_within: int
    share: float  # of all well-behaved requests
    requests_per_second: float


class ClassSummary(Struct, frozen=True):
    """One request class of the workload."""

    num_requests: int
    num_ok: int
    latencies: Latencies


class Interference(Struct, frozen=True):
    """What the background streams felt while the others intruded: first intruder sent … last one ended."""

    background: str
    intrusion_seconds: float
    prefill_seconds: float  # first intruder sent … last intruder's first text
    prefill_tokens_per_second: float  # intruders' prompt tokens ÷ prefill_seconds
    gap_before: Distribution | None
    gap_during: Distribution | None
    chunks_during: int  # over all background streams


class Summary(Struct, frozen=True):
    """One run."""

    num_requests: int
    num_ok: int
    num_served: int  # well-behaved and answered to the end
    num_given_up: int  # timed out or unfinished: in the latencies with the time waited
    errors: dict[str, int]  # kind → number
    duration_seconds: float  # first scheduled … last ended
    requests_per_second: float  # served
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: the server does not say
    num_without_usage: int  # requests whose tokens had to be counted by chunks
    input_tokens_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    latencies: Latencies
    decode_tokens_per_second: Distribution | None  # per request: 1 / tpot
    prefill_tokens_per_second: Distribution | None  # per request: prompt tokens ÷ ttft (one at a time: the rate)
    in_flight_mean: float
    in_flight_max: int
    in_flight_growth_per_second: float  # slope while requests were being sent: > 0 and steady = cannot hold
    goodput: Goodput | None
    by_class: dict[str, ClassSummary]
    interference: Interference | None
