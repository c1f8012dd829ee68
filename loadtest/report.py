"""The report of a run, a comparison or a sweep: typed data with a JSON form that stays stable.

`schema` says which of the three a file holds and in which version. docs/loadtest.schema.json is generated from
these classes (`octavo bench schema`).
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from loadtest.errors import BenchError
from loadtest.machine import Machine
from loadtest.records import RequestRecord
from loadtest.summary import Objective, Summary
from loadtest.workloads import Workload


class ClientHealth(Struct, frozen=True):
    """Whether the load generator kept up. Any warning makes the run's figures doubtful."""

    cpu_seconds: float
    cpu_share: float  # of one core
    loop_lag_p99_seconds: float
    loop_lag_max_seconds: float
    send_lag_p99_seconds: float  # sent − scheduled
    send_lag_max_seconds: float
    warnings: tuple[str, ...]


class ServerUse(Struct, frozen=True):
    """Known only for servers that the bench has started itself, on Linux."""

    cpu_cores: float | None
    peak_rss_bytes: int | None
    foreign_cpu_cores: float | None  # what processes other than server and client took


class Series(Struct, frozen=True):
    """Samples of /metrics. Every tuple of `values` is as long as `times`."""

    times: tuple[float, ...]  # seconds from the run's start
    values: dict[str, tuple[float | None, ...]]


class RequestRow(Struct, frozen=True):
    """One request. Times are seconds from the run's start."""

    label: str
    session: int
    turn: int
    scheduled_at: float
    sent_at: float
    ended_at: float
    max_tokens: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    status: int | None
    finish_reason: str | None
    error: str | None
    detail: str
    token_times: tuple[float, ...]  # arrivals of chunks of text; in comparisons the first and last only


class Setup(Struct, frozen=True):
    """All that is needed to make the run again."""

    name: str  # of the server, as given
    url: str
    model: str | None
    command: str | None  # that started the server, if the bench did
    workload: Workload  # with the load and the number of sessions as run
    endpoint: str
    seed: int
    warmup: int
    tokens_counted_by: str
    extra_body: dict[str, Any]
    weight_bytes: int | None  # as given: what one decode step of one stream must read at least


class RunReport(Struct, frozen=True, tag_field="schema", tag="octavo.bench.run/1"):
    """One run against one server."""

    created: str  # ISO 8601, UTC
    setup: Setup
    summary: Summary
    client: ClientHealth
    server: ServerUse
    series: Series
    requests: tuple[RequestRow, ...]
    machine: Machine


class Verdict(Struct, frozen=True):
    """One measure of one server against the baseline's, over all repetitions of one workload."""

    workload: str
    measure: str
    server: str
    baseline: str
    values: tuple[float, ...]  # per repetition
    baseline_values: tuple[float, ...]
    ratio: float | None  # median ÷ baseline's median
    ratio_low: float | None  # over the repetitions, pair by pair
    ratio_high: float | None
    outcome: str  # "better", "worse" or "no winner: …"


class CompareReport(Struct, frozen=True, tag_field="schema", tag="octavo.bench.compare/1"):
    """Interleaved repetitions of one or more workloads on two or more servers."""

    created: str
    servers: tuple[str, ...]  # the first is the baseline
    repetitions: int
    runs: tuple[RunReport, ...]  # in the order of running
    verdicts: tuple[Verdict, ...]
    startup_seconds: dict[str, float]  # server → process start to healthy, where the bench started it
    machine: Machine


class SweepReport(Struct, frozen=True, tag_field="schema", tag="octavo.bench.sweep/1"):
    """One workload at rising rates; the knee is the highest rate that kept the objective."""

    created: str
    objective: Objective
    attainment: float  # share of requests that must keep it
    rates: tuple[float, ...]
    runs: tuple[RunReport, ...]  # one per rate
    knee_rate: float | None  # None: not even the lowest rate kept it
    machine: Machine


Report = RunReport | CompareReport | SweepReport


def now() -> str:
    """The moment, as reports state it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def request_row(record: RequestRecord, start: float, *, every_token: bool) -> RequestRow:
    """One record with its times counted from `start`, to a hundredth of a millisecond."""
    times = record.token_times if every_token else (*record.token_times[:1], *record.token_times[-1:])
    return RequestRow(
        label=record.request.label,
        session=record.request.session,
        turn=record.request.turn,
        scheduled_at=round(record.scheduled_at - start, 5),
        sent_at=round(record.sent_at - start, 5),
        ended_at=round(record.ended_at - start, 5),
        max_tokens=record.request.max_tokens,
        prompt_tokens=record.num_prompt_tokens,
        output_tokens=record.num_output_tokens,
        cached_tokens=record.cached_tokens,
        status=record.status,
        finish_reason=record.finish_reason,
        error=record.error,
        detail=record.detail,
        token_times=tuple(round(time - start, 5) for time in times),
    )


def encode(report: Report) -> bytes:
    """The report as JSON."""
    return msgspec.json.encode(report)


def read_report(path: Path) -> Report:
    """Reads a report of any kind. Raises BenchError for a file that is none, or of a schema not known here."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"cannot read the report {path}: {error}") from error


def json_schema() -> dict[str, Any]:
    """JSON Schema of the three kinds of report."""
    (reference,), definitions = msgspec.json.schema_components([Report], ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Reports of octavo bench",
        **reference,
        "$defs": definitions,
    }
