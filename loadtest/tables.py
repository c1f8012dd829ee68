"""Reports as tables: plain data, drawn by the terminal and by the HTML page alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from loadtest.catalogue import LATENCY_MEASURES, MEASURES, Measure, three_digits
from loadtest.compare import MIN_REPETITIONS, strongest
from loadtest.report import CompareReport, Report, RunReport, SweepReport, Verdict
from loadtest.summary import Distribution, Latencies
from loadtest.workloads import Open, Replay

_LATENCY_NAMES = {
    "ttft": "time to first token",
    "gap": "inter-token gap",
    "tpot": "time per output token",
    "e2e": "end to end",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text; the first column is a heading."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables(report: Report) -> list[Table]:
    """All that a reader should see of a report."""
    match report:
        case RunReport():
            return _run_tables(report)
        case CompareReport():
            return _compare_tables(report)
        case SweepReport():
            return [_sweep_table(report)]


def print_tables(console: Console, found: Sequence[Table]) -> None:
    """Draws the tables in the terminal."""
    for table in found:
        drawn = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_justify="left", caption=table.note or None)
        for number, column in enumerate(table.columns):
            drawn.add_column(column, justify="right" if number else "left")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)


def markdown(table: Table) -> str:
    """The table for a document."""
    lines = [table.columns, ("---",) * len(table.columns), *table.rows]
    drawn = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    note = f"\n\n{table.note}" if table.note else ""
    return f"**{table.title}**\n\n{drawn}{note}\n"


def headline(report: RunReport) -> str:
    """The run in one line: server, workload, load, seed."""
    setup = report.setup
    load = setup.workload.load
    fields = ", ".join(f"{name} {getattr(load, name)}" for name in load.__struct_fields__)
    kind = type(load).__name__.lower()
    return f"{setup.name} · {setup.workload.name} ({setup.workload.description}) · {kind}: {fields} · seed {setup.seed}"


def _run_tables(report: RunReport) -> list[Table]:
    summary = report.summary
    found = [_latency_table(headline(report), summary.latencies), _figures(report)]
    if summary.by_class:
        rows = tuple(
            (
                label,
                f"{part.num_ok}/{part.num_requests}",
                *(_ms(part.latencies.ttft, name) for name in ("p50", "p99")),
                *(_ms(part.latencies.gap, name) for name in ("p50", "p99", "max")),
                _ms(part.latencies.e2e, "p50"),
            )
            for label, part in summary.by_class.items()
        )
        columns = ("class", "ok", "ttft p50 ms", "ttft p99 ms", "gap p50 ms", "gap p99 ms", "gap max ms", "e2e p50 ms")
        found.append(Table("By class of request", columns, rows))
    if summary.errors:
        found.append(Table("Failures", ("kind", "requests"), tuple((k, str(n)) for k, n in summary.errors.items())))
    if report.client.warnings:
        found.append(Table("Doubts about the client", ("warning",), tuple((w,) for w in report.client.warnings)))
    return found


def _latency_table(title: str, latencies: Latencies) -> Table:
    statistics = ("mean", "p50", "p90", "p95", "p99", "max")
    rows = []
    for part, name in _LATENCY_NAMES.items():
        found: Distribution | None = getattr(latencies, part)
        if found is not None:
            rows.append((name, *(_ms(found, statistic) for statistic in statistics), f"{found.count:,}"))
    return Table(title, ("latency, ms", *statistics, "count"), tuple(rows))


def _figures(report: RunReport) -> Table:
    shown = [
        (measure.name, f"{measure.shown(value)} {measure.unit}".strip())
        for measure in MEASURES
        if measure not in LATENCY_MEASURES and (value := measure.get(report)) is not None
    ]
    summary, client = report.summary, report.client
    shown.insert(0, ("requests", f"{summary.num_ok} ok of {summary.num_requests} in {summary.duration_seconds:.1f} s"))
    if summary.goodput is not None:
        shown.append(("within the objective", f"{summary.goodput.share:.1%}"))
    shown.append(("in flight, mean", f"{summary.in_flight_mean:.1f}"))
    if isinstance(report.setup.workload.load, Open | Replay):
        shown.append(("in flight, growth", f"{summary.in_flight_growth_per_second:+.3f} /s"))
    shown += _ceiling(report)
    shown.append(("client CPU", f"{client.cpu_share:.1%} of a core"))
    shown.append(("client lag p99", f"{client.loop_lag_p99_seconds * 1e3:.1f} ms"))
    return Table("Figures", ("figure", "value"), tuple(shown))


def _ceiling(report: RunReport) -> list[tuple[str, str]]:
    """The machine's measured limit, and how near one stream comes to it: a decode step reads every weight once."""
    bandwidth, weights = report.machine.read_bytes_per_second, report.setup.weight_bytes
    if bandwidth is None:
        return []
    shown = [("memory read ceiling", f"{bandwidth / 1e9:.1f} GB/s")]
    decode = report.summary.decode_tokens_per_second
    if weights and decode:
        limit = bandwidth / weights
        shown.append(("one stream's decode ceiling", f"{limit:.0f} tok/s, {decode.p50 / limit:.0%} reached"))
    return shown


def _compare_tables(report: CompareReport) -> list[Table]:
    found = []
    for workload in dict.fromkeys(verdict.workload for verdict in report.verdicts):
        found.append(_workload_table(report, workload))
        runs = [run for run in report.runs if run.setup.workload.name == workload]
        if all(run.summary.by_class for run in runs):
            found.append(_class_table(workload, report.servers, runs))
    return found


def _class_table(workload: str, servers: Sequence[str], runs: Sequence[RunReport]) -> Table:
    """Completion by server and class. Seconds; medians over the repetitions, but the longest of all for the waits."""
    rows = []
    for server in servers:
        mine = [run for run in runs if run.setup.name == server]
        whole = [("all", run.summary.latencies, run.summary.num_requests) for run in mine]
        parts = [
            (name, part.latencies, part.num_requests) for run in mine for name, part in run.summary.by_class.items()
        ]
        for label in dict.fromkeys(name for name, _, _ in whole + parts):
            found = [(latencies, count) for name, latencies, count in whole + parts if name == label]
            e2e = [latencies.e2e for latencies, _ in found if latencies.e2e is not None]
            waits = [latencies.ttft.max for latencies, _ in found if latencies.ttft is not None]
            if e2e and waits:
                figures = [median(getattr(d, statistic) for d in e2e) for statistic in ("mean", "p50", "p99")]
                count = median(count for _, count in found)
                rows.append((server, label, f"{count:g}", *(three_digits(x) for x in (*figures, max(waits)))))
    columns = ("server", "class", "requests", "mean s", "p50 s", "p99 s", "longest wait for the first token, s")
    return Table(f"{workload}: completion by class", columns, tuple(rows), note="medians over the repetitions")


def _workload_table(report: CompareReport, workload: str) -> Table:
    baseline, *others = report.servers
    rows = []
    for measure in MEASURES:
        found = [v for v in report.verdicts if v.workload == workload and v.measure == measure.name]
        if not any(any(verdict.values) or any(verdict.baseline_values) for verdict in found):
            continue  # nothing measured, or nothing but zeros
        values = {baseline: found[0].baseline_values} | {verdict.server: verdict.values for verdict in found}
        cells = [f"{measure.name}, {measure.unit}".rstrip(", ")]
        cells.append(_spread(measure, values[baseline]))
        for verdict in found:
            cells += [_spread(measure, verdict.values), _ratio(verdict)]
        rows.append((*cells, _winner(report, measure, values)))
    columns = ["measure", baseline]
    for other in others:
        columns += [other, f"÷ {baseline}"]
    return Table(
        f"{workload}: {report.repetitions} interleaved repetition{'s' if report.repetitions > 1 else ''}",
        (*columns, "winner"),
        tuple(rows),
        note="median (min – max); ratios of medians (min – max over pairs); "
        f"a winner's whole range lies beyond every other's, in at least {MIN_REPETITIONS} repetitions",
    )


def _winner(report: CompareReport, measure: Measure, values: Mapping[str, Sequence[float]]) -> str:
    if measure.higher_is_better is None:
        return ""
    if report.repetitions < MIN_REPETITIONS:
        return "none: too few"
    return strongest(measure, values) or "none: overlap"


def _sweep_table(report: SweepReport) -> Table:
    rows = []
    for rate, run in zip(report.rates, report.runs, strict=True):
        summary = run.summary
        rows.append(
            (
                f"{rate:g}",
                f"{summary.requests_per_second:.2f}",
                f"{summary.output_tokens_per_second:.0f}",
                _ms(summary.latencies.ttft, "p99"),
                _ms(summary.latencies.gap, "p99"),
                f"{summary.in_flight_growth_per_second:+.3f}",
                f"{summary.goodput.share:.1%}" if summary.goodput else "",
                "◀ knee" if rate == report.knee_rate else "",
            )
        )
    columns = ("rate, 1/s", "served, 1/s", "output tok/s", "ttft p99 ms", "gap p99 ms", "growth /s", "within", "")
    knee = "no rate kept the objective" if report.knee_rate is None else f"knee at {report.knee_rate:g} requests/s"
    return Table(f"{report.runs[0].setup.workload.name}: {knee}", columns, tuple(rows))


def _ms(found: Distribution | None, statistic: str) -> str:
    if found is None:
        return "–"
    return three_digits(float(getattr(found, statistic)) * 1e3)


def _spread(measure: Measure, values: Sequence[float]) -> str:
    middle = measure.shown(median(values))
    return middle if len(values) == 1 else f"{middle} ({measure.shown(min(values))} – {measure.shown(max(values))})"


def _ratio(verdict: Verdict) -> str:
    if verdict.ratio is None or verdict.ratio_low is None or verdict.ratio_high is None:
        return "–"
    spread = f" ({verdict.ratio_low:.2f} – {verdict.ratio_high:.2f})" if len(verdict.values) > 1 else ""
    return f"{verdict.ratio:.2f}{spread}"
