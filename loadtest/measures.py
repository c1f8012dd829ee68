"""From records to figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from loadtest.records import RequestRecord
from loadtest.stats import concurrency, distribution, slope
from loadtest.summary import (
    ClassSummary,
    Goodput,
    Interference,
    Latencies,
    Objective,
    Summary,
)
from loadtest.workloads import Manners

GIVEN_UP = ("timeout", "unfinished")


def summarise(
    records: Sequence[RequestRecord], objective: Objective | None = None, background: str | None = None
) -> Summary:
    """The figures of one run. `background` names the class that an intrusion disturbs."""
    served = [record for record in records if record.served]
    begin = min((record.scheduled_at for record in records), default=0.0)
    end = max((record.ended_at for record in records), default=0.0)
    seconds = max(end - begin, 1e-9)
    input_tokens = sum(record.num_prompt_tokens for record in served)
    output_tokens = sum(record.num_output_tokens for record in served)
    cached = [record.cached_tokens for record in served if record.cached_tokens is not None]
    in_flight = _in_flight(records)
    return Summary(
        num_requests=len(records),
        num_ok=sum(record.ok for record in records),
        num_served=len(served),
        num_given_up=sum(record.error in GIVEN_UP for record in records),
        errors=dict(sorted(Counter(record.error for record in records if record.error).items())),
        duration_seconds=end - begin,
        requests_per_second=len(served) / seconds,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        num_without_usage=sum(record.completion_tokens is None for record in served),
        input_tokens_per_second=input_tokens / seconds,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(input_tokens + output_tokens) / seconds,
        latencies=latencies(records),
        decode_tokens_per_second=distribution(1.0 / r.tpot_seconds for r in served if r.tpot_seconds),
        prefill_tokens_per_second=distribution(r.num_prompt_tokens / r.ttft_seconds for r in served if r.ttft_seconds),
        in_flight_mean=in_flight[0],
        in_flight_max=in_flight[1],
        in_flight_growth_per_second=in_flight[2],
        goodput=_goodput(records, objective, seconds) if objective is not None else None,
        by_class=_by_class(records),
        interference=_interference(records, background) if background is not None else None,
    )


def latencies(records: Sequence[RequestRecord]) -> Latencies:
    """Latencies of served and given-up requests. A request that was given up stalled at least until then: its
    missing first token and its open gap count with the time waited."""
    counted = [
        record
        for record in records
        if record.served or (record.error in GIVEN_UP and record.request.manners is Manners.NORMAL)
    ]
    gaps = [gap for record in counted for gap in record.gaps]
    gaps += [r.ended_at - r.token_times[-1] for r in counted if r.error is not None and r.token_times]
    return Latencies(
        ttft=distribution(_ttft(record) for record in counted if record.token_times or record.error),
        gap=distribution(gaps),
        tpot=distribution(r.tpot_seconds for r in counted if r.tpot_seconds is not None),
        e2e=distribution(record.e2e_seconds for record in counted),
    )


def within(record: RequestRecord, objective: Objective) -> bool:
    """Whether one request was served and kept every limit."""
    if not record.served:
        return False
    pairs = (
        (record.ttft_seconds, objective.ttft_seconds),
        (max(record.gaps, default=None), objective.gap_seconds),
        (record.tpot_seconds, objective.tpot_seconds),
        (record.e2e_seconds, objective.e2e_seconds),
    )
    return all(value is None or limit is None or value <= limit for value, limit in pairs)


def _ttft(record: RequestRecord) -> float:
    return record.e2e_seconds if record.ttft_seconds is None else record.ttft_seconds


def _goodput(records: Sequence[RequestRecord], objective: Objective, seconds: float) -> Goodput:
    normal = [record for record in records if record.request.manners is Manners.NORMAL]
    num_within = sum(within(record, objective) for record in normal)
    return Goodput(
        objective=objective,
        num_within=num_within,
        share=num_within / len(normal) if normal else 0.0,
        requests_per_second=num_within / seconds,
    )


def _in_flight(records: Sequence[RequestRecord]) -> tuple[float, int, float]:
    """Mean, maximum and growth per second of the requests scheduled but not ended."""
    if not records:
        return 0.0, 0, 0.0
    times, numbers = concurrency([(record.scheduled_at, record.ended_at) for record in records])
    duration = float(times[-1] - times[0])
    mean = float(np.diff(times) @ numbers[:-1]) / duration if duration > 0 else 0.0
    last_scheduled = max(record.scheduled_at for record in records)
    sending = times <= last_scheduled
    return mean, int(numbers.max()), slope(times[sending].tolist(), numbers[sending].tolist())


def _by_class(records: Sequence[RequestRecord]) -> dict[str, ClassSummary]:
    labels = list(dict.fromkeys(record.request.label for record in records))
    if len(labels) < 2:
        return {}
    groups = {label: [record for record in records if record.request.label == label] for label in labels}
    return {
        label: ClassSummary(len(group), sum(record.ok for record in group), latencies(group))
        for label, group in sorted(groups.items())
    }


def _interference(records: Sequence[RequestRecord], background: str) -> Interference | None:
    intruders = [record for record in records if record.request.label != background]
    firsts = [record.token_times[0] for record in intruders if record.token_times]
    if not firsts:
        return None
    begin, end = min(r.scheduled_at for r in intruders), max(r.ended_at for r in intruders)
    before: list[float] = []
    during: list[float] = []
    chunks_during = 0
    for record in records:
        if record.request.label != background:
            continue
        chunks_during += sum(begin <= time <= end for time in record.token_times)
        for earlier, later in zip(record.token_times, record.token_times[1:], strict=False):
            if later <= begin:
                before.append(later - earlier)
            elif earlier <= end:
                during.append(later - earlier)
    prefill_seconds = max(firsts) - begin
    tokens = sum(record.num_prompt_tokens for record in intruders if record.token_times)
    return Interference(
        background=background,
        intrusion_seconds=end - begin,
        prefill_seconds=prefill_seconds,
        prefill_tokens_per_second=tokens / prefill_seconds if prefill_seconds > 0 else 0.0,
        gap_before=distribution(before),
        gap_during=distribution(during),
        chunks_during=chunks_during,
    )
