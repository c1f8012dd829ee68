"""Reports as pictures (PNG). Needs matplotlib: the extra `octavo[bench]`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.catalogue import MEASURES
from loadtest.memory import memory_use
from loadtest.report import CompareReport, Report, RunReport, SweepReport
from loadtest.stats import concurrency
from loadtest.summary import Distribution

_MAX_LANES = 400
_LOG_FROM_RATIO = 8.0
_WAITING, _RUNNING = "#f2b872", "#3a76af"
_BAR_MEASURES = ("requests/s", "output tok/s", "ttft p50", "ttft p99", "gap p50", "gap p99", "gap max", "e2e p99")


def plots(report: Report) -> dict[str, bytes]:
    """Name → PNG, in reading order."""
    match report:
        case RunReport():
            return _run_plots(report)
        case CompareReport():
            return _compare_plots(report)
        case SweepReport():
            return {"sweep": _png(_sweep(report))}


def _run_plots(report: RunReport) -> dict[str, bytes]:
    drawn = {
        "latency": _png(_latency([(report.setup.name, report)])),
        "timeline": _png(_timeline(report)),
        "memory": _png(_memory(report)),
    }
    if not {"running", "waiting", "kv_use"}.isdisjoint(report.series.values):
        drawn["server"] = _png(_server_series(report))
    return drawn


def _compare_plots(report: CompareReport) -> dict[str, bytes]:
    drawn = {}
    for workload in dict.fromkeys(run.setup.workload.name for run in report.runs):
        runs = [run for run in report.runs if run.setup.workload.name == workload]
        middle = [(server, _middle_run([r for r in runs if r.setup.name == server])) for server in report.servers]
        drawn[f"{workload}-ratios"] = _png(_ratios(report, workload))
        drawn[f"{workload}-latency"] = _png(_latency(middle))
        if all(run.summary.by_class for run in runs):
            drawn[f"{workload}-classes"] = _png(_classes(middle))
    return drawn


def _classes(runs: Sequence[tuple[str, RunReport]]) -> Figure:
    """Completion times of each class, a curve a server."""
    labels = list(dict.fromkeys(label for _, run in runs for label in run.summary.by_class))
    figure = _figure(11, 3.2)
    for axes, label in zip(figure.subplots(1, len(labels), squeeze=False)[0], labels, strict=True):
        for name, run in runs:
            part = run.summary.by_class.get(label)
            if part is not None and part.latencies.e2e is not None:
                axes.plot(part.latencies.e2e.percentiles, np.arange(101), label=name)
        _label(axes, label, "completion, s", "% of requests")
        axes.set_xscale("log")
        axes.legend(fontsize=7)
    return figure


def _latency(runs: Sequence[tuple[str, RunReport]]) -> Figure:
    figure = _figure(11, 3.2)
    parts = {"ttft": "time to first token", "gap": "inter-token gap", "e2e": "end to end"}
    for axes, (part, title) in zip(figure.subplots(1, 3), parts.items(), strict=True):
        found: list[Distribution] = []
        for name, run in runs:
            curve: Distribution | None = getattr(run.summary.latencies, part)
            if curve is not None:
                axes.plot(np.asarray(curve.percentiles) * 1e3, np.arange(101), label=name)
                found.append(curve)
        _label(axes, title, "ms", "% of gaps" if part == "gap" else "% of requests")
        if found:
            axes.legend(fontsize=7)
            if max(d.p99 for d in found) > _LOG_FROM_RATIO * min(d.p50 for d in found):
                axes.set_xscale("log")
    return figure


def _timeline(report: RunReport) -> Figure:
    """Lanes of requests: who waits and who is in the batch at each moment; below, how many of each."""
    rows = [row for row in report.requests if row.token_times]
    figure = _figure(11, 6.5)
    lanes, counts = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for number, row in enumerate(rows[:_MAX_LANES]):
        first, last = row.token_times[0], row.token_times[-1]
        lanes.barh(number, first - row.scheduled_at, left=row.scheduled_at, height=0.8, color=_WAITING)
        lanes.barh(number, last - first, left=first, height=0.8, color=_RUNNING)
    lanes.invert_yaxis()
    more = f" (first {_MAX_LANES} of {len(rows)})" if len(rows) > _MAX_LANES else ""
    _label(lanes, f"requests{more}: waiting or prefilling (light), decoding (dark)", "", "request")
    _step(counts, [(row.scheduled_at, row.token_times[0]) for row in rows], "waiting or prefilling", _WAITING)
    _step(counts, [(row.token_times[0], row.token_times[-1]) for row in rows], "decoding", _RUNNING)
    _label(counts, "", "s", "requests")
    counts.legend(fontsize=7)
    return figure


def _memory(report: RunReport) -> Figure:
    figure = _figure(11, 3.2)
    axes = figure.subplots()
    use = memory_use(report.requests)
    axes.plot(use.times, use.reserved, label=f"reserved to the maximum: {use.efficiency(use.reserved):.1%} used")
    axes.plot(use.times, use.paged, label=f"blocks of 16: {use.efficiency(use.paged):.1%} used")
    axes.plot(use.times, use.held, label="tokens held")
    _label(axes, "KV memory of decoding requests, from the client's view", "s", "tokens")
    axes.legend(fontsize=7)
    return figure


def _server_series(report: RunReport) -> Figure:
    """What /metrics said, as far as the server has it: batch and queue, tokens a step, KV memory by state."""
    values = report.series.values
    panels = {
        ("batch and queue", "requests"): ("running", "waiting"),
        ("tokens of the sampled steps", "tokens"): ("step_prefill_tokens", "step_decode_tokens"),
        ("KV blocks by state", "blocks"): tuple(name for name in values if name.endswith("_blocks")),
        ("KV memory in use", "share"): ("kv_use",),
    }
    drawn = {title: names for title, names in panels.items() if any(name in values for name in names)}
    figure = _figure(11, 3.2)
    columns = figure.subplots(1, len(drawn), squeeze=False)[0]
    for axes, ((title, unit), names) in zip(columns, drawn.items(), strict=True):
        for name in names:
            if name in values:
                shown = [np.nan if value is None else value for value in values[name]]
                axes.plot(report.series.times, shown, label=name.replace("_", " "))
        _label(axes, f"{title} (/metrics)", "s", unit)
        axes.legend(fontsize=7)
    return figure


def _sweep(report: SweepReport) -> Figure:
    figure = _figure(11, 3.4)
    left, right = figure.subplots(1, 2)
    served = [run.summary.requests_per_second for run in report.runs]
    for part in ("ttft", "e2e"):
        for statistic in ("p50", "p99"):
            found = [getattr(run.summary.latencies, part) for run in report.runs]
            values = [np.nan if d is None else getattr(d, statistic) * 1e3 for d in found]
            left.plot(served, values, marker="o", label=f"{part} {statistic}")
    _label(left, "latency against throughput", "requests/s served", "ms")
    left.set_yscale("log")
    shares = [100 * run.summary.goodput.share if run.summary.goodput else np.nan for run in report.runs]
    right.plot(report.rates, shares, marker="o", label="within the objective")
    right.axhline(100 * report.attainment, linestyle=":", color="grey")
    if report.knee_rate is not None:
        right.axvline(report.knee_rate, linestyle="--", color="grey", label=f"knee {report.knee_rate:g}/s")
    _label(right, "objective", "requests/s offered", "% of requests")
    for axes in (left, right):
        axes.legend(fontsize=7)
    return figure


def _ratios(report: CompareReport, workload: str) -> Figure:
    """Ratios to the baseline with their spread; right of 1 is more, which is better only for rates."""
    figure = _figure(11, 4.0)
    axes = figure.subplots()
    names = [m.name for m in MEASURES if m.name in _BAR_MEASURES and any(v.measure == m.name for v in report.verdicts)]
    others = report.servers[1:]
    height = 0.8 / max(len(others), 1)
    for number, server in enumerate(others):
        for place, name in enumerate(names):
            for v in report.verdicts:
                if (v.workload, v.server, v.measure) != (workload, server, name) or not v.ratio:
                    continue
                assert v.ratio_low is not None
                assert v.ratio_high is not None
                error = [[max(0.0, v.ratio - v.ratio_low)], [max(0.0, v.ratio_high - v.ratio)]]
                label = server if place == 0 else None
                axes.barh(
                    place + number * height, v.ratio, height, xerr=error, color=f"C{number}", label=label, capsize=2
                )
    axes.set_yticks(np.arange(len(names)) + 0.4 - height / 2, names)
    axes.axvline(1.0, color="grey", linewidth=1)
    axes.invert_yaxis()
    _label(axes, f"{workload}: ratio to {report.servers[0]} (bars: spread over the repetitions)", "ratio", "")
    axes.legend(fontsize=7)
    return figure


def _middle_run(runs: Sequence[RunReport]) -> RunReport:
    """The repetition whose throughput is the median one."""
    middle = median([run.summary.requests_per_second for run in runs])
    return min(runs, key=lambda run: abs(run.summary.requests_per_second - middle))


def _step(axes: Axes, intervals: Sequence[tuple[float, float]], label: str, color: str) -> None:
    times, numbers = concurrency(intervals)
    axes.step(times, numbers, where="post", label=label, color=color)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
