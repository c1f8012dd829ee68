"""The headline comparisons of Octavo with itself, one after the other: reports as JSON and pages, and a Markdown
fragment for docs/benchmarks.md.

    python scripts/headline_figures.py --output figures              # on a quiet machine, some 15 minutes
    python scripts/headline_figures.py --output figures --only policies kv-memory ablation --weights FOLDER
    python scripts/headline_figures.py --output tiny --tiny          # does it all work; no figures worth keeping

Each is one preset of `octavo bench compare`, and can be made alone by the command that stands above its table.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from loadtest.errors import BenchError
from loadtest.launch import LaunchedServer
from loadtest.machine import describe_machine
from loadtest.memory import memory_use
from loadtest.presets import find_preset
from loadtest.report import CompareReport, RunReport, read_report
from loadtest.tables import Table, markdown, tables
from loadtest.whatif import read_cost, simulation_tables

SEATS, BUDGET = 16, 512  # of the batching preset's servers: --max-num-seqs, and the CPU's default budget
COST_SIZES = "1,2,4,8,12,16"
COST_PROMPTS = "16,64,128,256,480"
MEAN_CONTEXT = 216  # of the `uniform` workload: a mean prompt of 175, and half of 82 of the 96 tokens measured


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    output: Path
    serve: str
    repetitions: int
    weights: Path | None
    tiny: bool


@dataclass(frozen=True)
class Comparison:
    """One preset on one workload, with the rows that the document shows and what is worked out from the report."""

    name: str
    preset: str
    workload: str
    measures: tuple[str, ...]  # beginnings of row names; () = all
    tiny: tuple[str, ...]  # arguments that make it short
    arguments: tuple[str, ...] = ()
    conclude: Callable[[CompareReport], str] = lambda report: ""


def run(comparison: Comparison, options: Options) -> tuple[CompareReport, str]:
    """The report, and its part of the fragment. Raises BenchError if the comparison fails."""
    folder = options.output / comparison.name
    arguments = ["compare", "--preset", comparison.preset, "-w", comparison.workload, *comparison.arguments]
    arguments += ["--repetitions", str(options.repetitions), *(comparison.tiny if options.tiny else ())]
    if options.weights is not None and any("{weights}" in v for v in _commands(comparison.preset)):
        arguments += ["--weights", str(options.weights)]
    bench([*arguments, "--serve", options.serve, "--max-retries", "1", "--quiet", "-o", str(folder)])
    report = read_report(folder / "report.json")
    if not isinstance(report, CompareReport):
        raise BenchError(f"{folder} holds no comparison")
    found = [_narrowed(table, comparison.measures) for table in tables(report)]
    command = shlex.join(["octavo", "bench", *arguments])
    text = f"    {command}\n\n" + "\n".join(markdown(table) for table in found)
    return report, f"{text}\n{comparison.conclude(report)}"


def bench(arguments: Sequence[str]) -> None:
    """`octavo bench`, its tables on our stdout. Raises BenchError if it fails."""
    command = [sys.executable, "-m", "loadtest", *arguments]
    if subprocess.run(command, check=False, cwd=Path(__file__).resolve().parents[1]).returncode:
        raise BenchError(f"failed: {shlex.join(command)}")


def batching(options: Options) -> str:
    """Continuous against static: at saturation, at a rate between what either can hold, and the simulation of both."""
    measures = (
        "requests/s",
        "output tok/s",
        "ttft p50",
        "gap p50",
        "gap p99",
        "e2e mean",
        "e2e p99",
        "in flight max",
        "failed",
    )
    saturated = Comparison(
        "batching", "batching", "uniform", measures, ("--sessions", "6"), ("--users", "32", "--sessions", "64")
    )
    report, text = run(saturated, options)
    static, continuous = (throughput(report, name) for name in ("static", "continuous"))
    rate = round((static * continuous) ** 0.5, 2)
    at_rate = Comparison(
        "batching-rate",
        "batching",
        "uniform",
        measures,
        ("--sessions", "6"),
        ("--rate", str(rate), "--sessions", str(max(64, round(45 * rate)))),
        growth,
    )
    rated, rated_text = run(at_rate, options)
    cost_file = options.output / "cost.json"
    measure_cost(cost_file, options)
    simulated = [
        markdown(table)
        for one in (report, rated)
        for table in simulation_tables(one, read_cost(cost_file), SEATS, BUDGET)
    ]
    return "\n".join((text, rated_text, "The same requests simulated with the measured cost of a step:\n", *simulated))


def measure_cost(path: Path, options: Options) -> None:
    """`octavo bench cost` on a server like those compared."""
    spec = find_preset("batching").servers(options.serve)[1]
    server = LaunchedServer(spec)
    try:
        asyncio.run(server.healthy(600.0))
        sizes = ["--batch-sizes", "1,2", "--prompt-lengths", "16,64"] if options.tiny else []
        sizes = sizes or ["--batch-sizes", COST_SIZES, "--prompt-lengths", COST_PROMPTS]
        context = ["--context-tokens", str(MEAN_CONTEXT)]
        bench(["cost", "--url", server.url, *sizes, *context, "--quiet", "-o", str(path)])
    finally:
        server.stop()


def growth(report: CompareReport) -> str:
    lines = [
        f"{name} {median(run.summary.in_flight_growth_per_second for run in runs_of(report, name)):+.2f}"
        for name in report.servers
    ]
    return f"Growth of requests in flight while they arrived, 1/s: {', '.join(lines)}.\n"


def prefix(report: CompareReport) -> str:
    """Of the requests that can hit: all but each run's first."""
    [kind] = report.runs[0].setup.workload.classes
    assert isinstance(kind.prompt, int)
    expected = kind.shared / (kind.shared + kind.prompt)
    rows = [row for run in runs_of(report, "on") for row in run.requests[1:]]
    rate = sum(row.cached_tokens or 0 for row in rows) / sum(row.prompt_tokens for row in rows)
    off, on = (median_ttft(report, name) for name in ("off", "on"))
    return (
        f"Hit rate behind the first request: {rate:.4f}; P/(P+U) = {expected:.4f} ({rate / expected - 1:+.2%}). "
        f"Time to first token, off ÷ on: {off / on:.1f}; (P+U)/U = {1 / (1 - expected):.1f}.\n"
    )


def order(report: CompareReport) -> str:
    """Against the last server, whose pool loses nothing: only the first request of each prefix misses it."""
    shares = {
        name: median(
            sum(row.cached_tokens or 0 for row in run.requests) / sum(row.prompt_tokens for row in run.requests)
            for run in runs_of(report, name)
        )
        for name in report.servers
    }
    best = shares[report.servers[-1]]
    lines = [f"{name} {share:.3f}, {share / best:.0%} of the best possible" for name, share in shares.items()]
    return f"Share of prompt tokens from the cache: {'; '.join(lines)}.\n"


def chunking(report: CompareReport) -> str:
    whole = median(run.summary.duration_seconds for run in runs_of(report, "whole"))
    ratios = [
        f"{name} {median(run.summary.duration_seconds for run in runs_of(report, name)) / whole:.3f}"
        for name in report.servers[1:]
    ]
    return f"Total time ÷ whole: {', '.join(ratios)}.\n"


def memory(report: CompareReport) -> str:
    """What both schemes would have set aside for the paged server's requests."""
    use = [memory_use(run.requests) for run in runs_of(report, "paged")]
    paged, reserved = (median(u.efficiency(getattr(u, scheme)) for u in use) for scheme in ("paged", "reserved"))
    return (
        f"KV memory used of what is set aside: {paged:.1%} in blocks of 16, {reserved:.1%} reserved to the longest.\n"
    )


def steps(report: CompareReport) -> str:
    """Each variant against the one before it."""
    rates = {name: median(r.summary.output_tokens_per_second for r in runs_of(report, name)) for name in report.servers}
    lines = ["| step | output tok/s | ÷ the step before | ÷ the first |", "| --- | --- | --- | --- |"]
    names = list(rates)
    for before, name in zip([names[0], *names], names, strict=False):
        gains = (rates[name] / rates[before], rates[name] / rates[names[0]])
        lines.append(f"| {name} | {rates[name]:.1f} | {gains[0]:.2f} | {gains[1]:.2f} |")
    return "\n".join(lines) + "\n"


def runs_of(report: CompareReport, server: str) -> list[RunReport]:
    return [run for run in report.runs if run.setup.name == server]


def throughput(report: CompareReport, server: str) -> float:
    return median(run.summary.requests_per_second for run in runs_of(report, server))


def median_ttft(report: CompareReport, server: str) -> float:
    found = [run.summary.latencies.ttft for run in runs_of(report, server)]
    return median(distribution.p50 for distribution in found if distribution is not None)


def _narrowed(table: Table, measures: tuple[str, ...]) -> Table:
    if not measures or table.columns[0] != "measure":
        return table
    rows = tuple(row for row in table.rows if row[0].startswith(measures))
    return Table(table.title, table.columns, rows, table.note)


def _commands(preset: str) -> list[str]:
    found = find_preset(preset)
    return [f"{found.variant(name).command} {found.variant(name).flags}" for name in found.variants]


def plain(comparison: Comparison) -> Callable[[Options], str]:
    return lambda options: run(comparison, options)[1]


_RATES = ("requests/s", "output tok/s", "ttft p50", "ttft p99", "gap p99", "e2e mean", "e2e p99", "failed")
_CACHE = ("requests/s", "ttft p50", "ttft p99", "e2e mean", "prompt tokens from cache", "failed")
_GAPS = ("gap p50 before", "gap p50 during", "gap p99 during", "gap max during", "intrusion", "intruders", "failed")

FIGURES: dict[str, tuple[str, Callable[[Options], str]]] = {
    "batching": ("Continuous and static batching", batching),
    "prefix-cache": (
        "The prefix cache: 2,560 tokens shared, 256 own",
        plain(Comparison("prefix-cache", "prefix-cache", "prefix-2560", _CACHE, ("--sessions", "3"), (), prefix)),
    ),
    "cache-order": (
        "Order by cached prefix under a small pool",
        plain(Comparison("cache-order", "cache-order", "prefix-groups", _CACHE, ("--sessions", "30"), (), order)),
    ),
    "chunking": (
        "Chunked prefill: 8 streams while prompts of 2,048 tokens arrive",
        plain(Comparison("chunking", "chunking", "interference", _GAPS, ("--sessions", "9"), (), chunking)),
    ),
    "policies": (
        "Queue policies over HTTP",
        plain(Comparison("policies", "policies", "mixed", _RATES, ("--sessions", "8"))),
    ),
    "kv-memory": (
        "KV memory reserved and paged",
        plain(Comparison("kv-memory", "kv-memory", "kv-memory", _RATES, ("--sessions", "6"), (), memory)),
    ),
    "ablation": (
        "One thing at a time",
        plain(Comparison("ablation", "ablation", "ablation", _RATES, ("--sessions", "2"), (), steps)),
    ),
}
HEADLINES = ("batching", "prefix-cache", "cache-order", "chunking")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for reports and figures.md")
    parser.add_argument(
        "--only", nargs="+", choices=FIGURES, default=HEADLINES, metavar="NAME", help=", ".join(FIGURES)
    )
    parser.add_argument(
        "--serve",
        default=f"{shlex.quote(sys.executable)} -m server.cli serve",
        help="how Octavo is started (default: this checkout)",
    )
    parser.add_argument("--weights", type=Path, help="the unquantised model, for the ablation")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a few requests each, one repetition")
    args = parser.parse_args()
    options = Options(args.output, args.serve, 1 if args.tiny else args.repetitions, args.weights, args.tiny)
    options.output.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(measure_bandwidth=False)
    where = f"{machine.cpu}, {machine.num_cpus} CPUs, {machine.system}, Python {machine.python}"
    parts, failed = [f"scripts/headline_figures.py, {datetime.now(UTC):%Y-%m-%d}, {where}.\n"], False
    for name in args.only:
        title, make = FIGURES[name]
        begun = time.monotonic()
        try:
            parts.append(f"## {title}\n\n{make(options)}")
        except BenchError as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr)  # noqa: T201
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)  # noqa: T201
        (options.output / "figures.md").write_text("\n".join(parts))  # as far as it is: the rest may fail
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
