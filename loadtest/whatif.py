"""Sets measured continuous and static batching beside the simulation of the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from loadtest.errors import BenchError
from loadtest.report import Report, RunReport
from loadtest.simulate import Batching, Engine, Job, Outcome, StepCost, constant_cost, simulate
from loadtest.tables import Table
from loadtest.workloads import Closed

_Pair = Sequence[Sequence[Outcome]]  # continuous, static: an outcome a run

_FIGURES = {
    "requests_per_second": "requests/s",
    "mean_latency": "mean latency, s",
    "p99_latency": "p99 latency, s",
    "mean_ttft": "mean time to first token, s",
    "waste": "seat time not decoding",
    "max_in_flight": "in flight, max",
}


def read_cost(path: Path) -> StepCost:
    """Reads what `octavo bench cost` wrote. Raises BenchError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepCost)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"cannot read the step cost {path}: {error}") from error


def simulation_tables(report: Report, cost: StepCost, max_num_seqs: int, token_budget: int) -> list[Table]:
    """One table a workload: both ways of batching simulated for the report's own requests (median over its runs),
    with the measured step cost and with one that does not grow; and, where the report compares servers named
    `continuous` and `static`, what was measured, and how it stands to the simulation."""
    runs = [report] if isinstance(report, RunReport) else list(report.runs)
    workloads = dict.fromkeys(run.setup.workload.name for run in runs)
    return [
        _table(name, [run for run in runs if run.setup.workload.name == name], cost, max_num_seqs, token_budget)
        for name in workloads
    ]


def observed(run: RunReport, max_num_seqs: int) -> Outcome:
    """The measured run in the simulation's terms."""
    summary = run.summary
    decoding = sum(row.token_times[-1] - row.token_times[0] for row in run.requests if row.token_times)
    e2e, ttft = summary.latencies.e2e, summary.latencies.ttft
    if e2e is None or ttft is None:
        raise BenchError(f"the run on {run.setup.name} served nothing: there is nothing to simulate")
    return Outcome(
        requests_per_second=summary.requests_per_second,
        mean_latency=e2e.mean,
        p99_latency=e2e.p99,
        mean_ttft=ttft.mean,
        waste=1.0 - decoding / (max_num_seqs * summary.duration_seconds),
        max_in_flight=summary.in_flight_max,
    )


def _table(name: str, runs: list[RunReport], cost: StepCost, max_num_seqs: int, token_budget: int) -> Table:
    def simulated(batching: Batching, step_cost: StepCost) -> list[Outcome]:
        engine = Engine(batching, max_num_seqs, token_budget)
        return [simulate(_jobs(run), step_cost, engine, _users(run)) for run in runs]

    def measured(server: Batching) -> list[Outcome]:
        return [observed(run, max_num_seqs) for run in runs if run.setup.name == server]

    flat = constant_cost(cost.seconds(max_num_seqs, 0))
    columns = {
        "simulated": [simulated(batching, cost) for batching in Batching],
        "constant cost": [simulated(batching, flat) for batching in Batching],
        "measured": [measured(batching) for batching in Batching],
    }
    shown = {source: pair for source, pair in columns.items() if all(pair)}
    headings = [f"{source} {part}" for source in shown for part in (*Batching, "ratio")]
    if "measured" in shown:
        headings += [f"measured ÷ simulated {part}" for part in (*Batching, "ratio")]
    rows = []
    for figure, title in _FIGURES.items():
        cells = [cell for pair in shown.values() for cell in _cells(pair, figure)]
        if "measured" in shown:
            cells += _agreement(shown["measured"], shown["simulated"], figure)
        rows.append((title, *cells))
    return Table(
        f"{name}: {max_num_seqs} seats, {token_budget} tokens a step",
        ("figure", *headings),
        tuple(rows),
        note="ratio: continuous ÷ static; constant cost: what scheduling alone can give",
    )


def _agreement(measured: _Pair, simulated: _Pair, figure: str) -> list[str]:
    """Measured ÷ simulated: continuous, static, and their ratio."""
    (seen, seen_static), (thought, thought_static) = _medians(measured, figure), _medians(simulated, figure)
    if not (thought and thought_static and seen_static):
        return ["–"] * 3
    continuous, static = seen / thought, seen_static / thought_static
    return [f"{value:.2f}" for value in (continuous, static, continuous / static)]


def _medians(pair: _Pair, figure: str) -> tuple[float, float]:
    continuous, static = (median(getattr(outcome, figure) for outcome in outcomes) for outcomes in pair)
    return continuous, static


def _cells(pair: _Pair, figure: str) -> tuple[str, str, str]:
    continuous, static = _medians(pair, figure)
    return f"{continuous:.3g}", f"{static:.3g}", f"{continuous / static:.2f}" if static else "–"


def _jobs(run: RunReport) -> list[Job]:
    return [
        Job(row.scheduled_at, max(1, row.prompt_tokens - (row.cached_tokens or 0)), row.output_tokens)
        for row in run.requests
        if row.token_times
    ]


def _users(run: RunReport) -> int | None:
    load = run.setup.workload.load
    return load.users if isinstance(load, Closed) else None
