"""The command line of `octavo bench`, and how its values are read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import randrange
from typing import Any

from loadtest.errors import BenchError
from loadtest.summary import Objective

_EPILOG = """examples:
  octavo bench run -w w2                                   16 users, 64 requests, against 127.0.0.1:8000
  octavo bench run -w uniform --rate 4 -o out              Poisson arrivals; report, page and plots in out/
  octavo bench sweep -w sharegpt --objective ttft=1,gap=0.2
  octavo bench compare -w w1 -w w2 --server 'octavo=octavo serve --port {port}' \\
      --server 'llama=llama-server -m model.gguf --port {port} -np 16'
  octavo bench compare --preset batching
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line; the chosen command is in `command`."""
    root = argparse.ArgumentParser(
        prog="octavo bench",
        description="Load tests of OpenAI-compatible servers, with figures that can be trusted.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="command")
    url, client, workload, shape, report = (make() for make in (_url, _client, _workload, _shape, _report))

    run = commands.add_parser("run", parents=[url, client, workload, shape, report], help="one workload on one server")
    run.add_argument(
        "--weight-bytes",
        type=positive_int,
        metavar="N",
        help="size of the model's weights: states one stream's ceiling",
    )
    run.add_argument("--compact", action="store_true", help="keep no time of every token in report.json")
    _add_ceiling(run)

    compare = commands.add_parser(
        "compare", parents=[client, workload, shape, report], help="servers in turn, with ratios and their spread"
    )
    _add_comparison(compare)

    sweep = commands.add_parser(
        "sweep", parents=[url, client, workload, report], help="the highest rate within an objective"
    )
    _add_search(sweep)

    cost = commands.add_parser("cost", parents=[url, client], help="measure what a step costs, for simulate")
    _add_cost(cost)

    simulate = commands.add_parser("simulate", help="continuous against static batching, by arithmetic")
    simulate.add_argument("report", type=Path, help="report.json of a run or of `compare --preset batching`")
    simulate.add_argument("--cost", type=Path, required=True, metavar="FILE", help="from `octavo bench cost`")
    simulate.add_argument("--max-num-seqs", type=positive_int, default=16, metavar="N", help="[%(default)s]")
    simulate.add_argument("--token-budget", type=positive_int, default=256, metavar="N", help="[%(default)s]")

    show = commands.add_parser("show", parents=[report], help="draw an existing report.json again")
    show.add_argument("report", type=Path)

    known = commands.add_parser("list", help="the workloads and presets there are")
    known.add_argument("-f", "--workload-file", type=Path, metavar="FILE")
    commands.add_parser("schema", help="JSON Schema of report.json")
    return root


def positive_int(text: str) -> int:
    """At least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def positive(text: str) -> float:
    """Above 0; inf is allowed."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def integers(text: str) -> tuple[int, ...]:
    """Ascending positive integers between commas."""
    try:
        values = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of integers") from error
    if values[0] < 1:
        raise argparse.ArgumentTypeError("only positive integers")
    return values


def objective(text: str) -> Objective:
    """Reads `ttft=1,gap=0.2,tpot=0.05,e2e=10` (seconds; any of the four)."""
    limits: dict[str, float] = {}
    try:
        for part in text.split(","):
            name, _, seconds = part.partition("=")
            limits[f"{name.strip()}_seconds"] = float(seconds)
        return Objective(**limits)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected something like ttft=1,gap=0.2") from error


def extra_body(text: str) -> dict[str, Any]:
    """Reads the JSON object of `--body`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def check(args: argparse.Namespace) -> None:
    """What argparse cannot say. Raises BenchError."""
    if args.command == "sweep" and args.objective is None:
        raise BenchError("a sweep needs an --objective, e.g. --objective ttft=1,gap=0.2")
    if args.command == "compare" and not args.preset and len(args.server) < 2:
        raise BenchError("a comparison needs a --preset, or --server at least twice")


def _url() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--url", default="http://127.0.0.1:8000", help="the server [%(default)s]")
    return options


def _client() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("client")
    group.add_argument("--model", help="model name to send [the first that the server lists]")
    group.add_argument("--api-key", metavar="KEY")
    group.add_argument(
        "--allow-remote", action="store_true", help="the target is not this machine, and its owner agrees"
    )
    group.add_argument(
        "--tokenizer",
        default="auto",
        metavar="WHICH",
        help="how prompts are measured: server (/tokenize), words, a tokenizer.json, or auto: server if it can [auto]",
    )
    group.add_argument(
        "--body", type=extra_body, default={}, metavar="JSON", help="merged over every body; null removes a field"
    )
    group.add_argument(
        "--timeout", type=positive, default=300.0, metavar="S", help="seconds until a request is given up [300]"
    )
    group.add_argument(
        "--seed",
        type=int,
        default=randrange(1_000_000),
        metavar="N",
        help="of lengths, prompts and arrivals [drawn, so that a second run meets no prefix cache of the first]",
    )
    group.add_argument("--quiet", action="store_true", help="no progress")
    return options


def _workload() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("workload")
    group.add_argument("-w", "--workload", action="append", metavar="NAME", help="see `octavo bench list` [smoke]")
    group.add_argument("-f", "--workload-file", type=Path, metavar="FILE", help="TOML with workloads of your own")
    group.add_argument("--sessions", type=positive_int, metavar="N", help="instead of the workload's own number")
    group.add_argument("--endpoint", choices=("completions", "chat"), help="instead of the workload's own")
    group.add_argument(
        "--burstiness",
        type=positive,
        default=1.0,
        metavar="K",
        help="shape of the gamma gaps between arrivals; 1 = Poisson, less = bursts [1]",
    )
    group.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before the clock starts [2]")
    group.add_argument("--duration", type=positive, default=600.0, metavar="S", help="send nothing after so long [600]")
    group.add_argument("--grace", type=float, default=60.0, metavar="S", help="then wait so long for what runs [60]")
    group.add_argument(
        "--max-in-flight",
        type=positive_int,
        default=1024,
        metavar="N",
        help="open loop: more wait in the client, their time counted [1024]",
    )
    group.add_argument(
        "--objective",
        type=objective,
        metavar="…",
        help="limits in seconds for goodput, e.g. ttft=1,gap=0.2,tpot=0.05,e2e=10",
    )
    return options


def _shape() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    shape = options.add_argument_group("load, instead of the workload's own").add_mutually_exclusive_group()
    shape.add_argument("--users", type=positive_int, metavar="N", help="closed loop: N at once")
    shape.add_argument("--rate", type=positive, metavar="R", help="open loop: R sessions arrive per second")
    shape.add_argument("--trace", metavar="FILE", help="open loop: recorded arrivals and lengths, .csv or .jsonl")
    options.add_argument("--speed", type=positive, default=1.0, metavar="X", help="replay --trace X times as fast [1]")
    return options


def _report() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("report")
    group.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="write report.json, report.html and plots here"
    )
    group.add_argument("--json", action="store_true", help="print report.json on one line instead of tables")
    return options


def _add_comparison(compare: argparse.ArgumentParser) -> None:
    group = compare.add_argument_group("servers")
    group.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=…",
        help="a URL, or a command with {port} that is started and ended; repeat; the first is the baseline",
    )
    group.add_argument("--preset", metavar="NAME", help="variants of Octavo itself; see `octavo bench list`")
    group.add_argument(
        "--serve", default="octavo serve", metavar="COMMAND", help="how a preset starts Octavo [%(default)s]"
    )
    group.add_argument(
        "--weights",
        type=Path,
        metavar="FOLDER",
        help="the unquantised model, for presets that compare with it; scripts/unquantise.py makes it",
    )
    group.add_argument(
        "--repetitions", type=positive_int, default=3, metavar="N", help="[%(default)s]; fewer than 3 give no winner"
    )
    group.add_argument("--one-at-a-time", action="store_true", help="start each server for its turn only")
    group.add_argument("--health-timeout", type=positive, default=600.0, metavar="S", help="[%(default)s]")
    group.add_argument(
        "--max-foreign-cpu",
        type=float,
        default=0.15,
        metavar="CORES",
        help="repeat a run that other processes disturbed by more [%(default)s]",
    )
    group.add_argument("--max-retries", type=int, default=2, metavar="N", help="… so often at most [%(default)s]")
    _add_ceiling(compare)


def _add_search(sweep: argparse.ArgumentParser) -> None:
    sweep.add_argument(
        "--from-rate", type=positive, default=0.5, metavar="R", help="first rate tried, then doubled [%(default)s]"
    )
    sweep.add_argument(
        "--attainment", type=positive, default=0.99, metavar="S", help="share of requests within it [%(default)s]"
    )
    sweep.add_argument("--max-runs", type=positive_int, default=8, metavar="N", help="runs at most [%(default)s]")
    _add_ceiling(sweep)


def _add_cost(cost: argparse.ArgumentParser) -> None:
    cost.add_argument(
        "--batch-sizes", type=integers, default=(1, 2, 4, 8, 16, 32), metavar="M,…", help="[1,2,4,8,16,32]"
    )
    cost.add_argument(
        "--prompt-lengths", type=integers, default=(16, 64, 128, 256), metavar="N,…", help="[16,64,128,256]"
    )
    cost.add_argument(
        "--context-tokens",
        type=positive_int,
        default=64,
        metavar="N",
        help="prompt of the decoding streams: best the mean context of the workload to be simulated [%(default)s]",
    )
    cost.add_argument("-o", "--output", type=Path, default=Path("cost.json"), metavar="FILE", help="[%(default)s]")


def _add_ceiling(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ceiling", action="store_true", help="measure the machine's memory bandwidth too")
