"""Verdicts over interleaved repetitions: ratios with their spread, and no winner where the spreads overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from loadtest.catalogue import MEASURES, Measure
from loadtest.report import RunReport, Verdict

MIN_REPETITIONS = 3


def judge(
    workload: str, measure: Measure, baseline: tuple[str, Sequence[float]], other: tuple[str, Sequence[float]]
) -> Verdict:
    """Compares the repetitions of one measure, paired in order of running.

    `other` is better or worse only if there are at least three repetitions and its whole range lies on one side
    of the baseline's whole range.
    """
    baseline_name, baseline_values = baseline
    name, values = other
    middle = median(baseline_values)
    pairs = [mine / theirs for mine, theirs in zip(values, baseline_values, strict=True) if theirs]
    return Verdict(
        workload=workload,
        measure=measure.name,
        server=name,
        baseline=baseline_name,
        values=tuple(values),
        baseline_values=tuple(baseline_values),
        ratio=median(values) / middle if middle else None,
        ratio_low=min(pairs, default=None),
        ratio_high=max(pairs, default=None),
        outcome=_outcome(measure, values, baseline_values),
    )


def verdicts(runs: Sequence[RunReport], servers: Sequence[str]) -> tuple[Verdict, ...]:
    """Every other server against the first, for each workload and each measure that all runs have."""
    found = []
    workloads = dict.fromkeys(run.setup.workload.name for run in runs)
    for workload in workloads:
        by_server = {
            server: [r for r in runs if r.setup.workload.name == workload and r.setup.name == server]
            for server in servers
        }
        for measure in MEASURES:
            values = {server: [measure.get(run) for run in group] for server, group in by_server.items()}
            columns = {server: [v for v in column if v is not None] for server, column in values.items()}
            if any(len(columns[server]) != len(values[server]) or not columns[server] for server in servers):
                continue
            baseline = (servers[0], columns[servers[0]])
            found += [judge(workload, measure, baseline, (server, columns[server])) for server in servers[1:]]
    return tuple(found)


def strongest(measure: Measure, columns: Mapping[str, Sequence[float]]) -> str | None:
    """The server whose whole range beats every other server's whole range; None if there is none such, or
    fewer than three repetitions."""
    for server, values in columns.items():
        others = [other for name, other in columns.items() if name != server]
        if others and all(_outcome(measure, values, other) == "better" for other in others):
            return server
    return None


def _outcome(measure: Measure, values: Sequence[float], baseline: Sequence[float]) -> str:
    if measure.higher_is_better is None:
        return "no winner: neither way is better"
    if min(len(values), len(baseline)) < MIN_REPETITIONS:
        return f"no winner: fewer than {MIN_REPETITIONS} repetitions"
    if min(values) > max(baseline):
        return "better" if measure.higher_is_better else "worse"
    if max(values) < min(baseline):
        return "worse" if measure.higher_is_better else "better"
    return "no winner: the spreads overlap"
