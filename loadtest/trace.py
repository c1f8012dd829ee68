"""Recorded traffic: when requests came and how long they were."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtest.errors import BenchError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One recorded request; the first of a trace arrives at 0."""

    at_seconds: float
    prompt_tokens: int
    output_tokens: int


# field names of our own format, of the Azure LLM inference traces (CSV) and of the Mooncake traces (JSON lines)
_TIME = {"at_seconds": 1.0, "TIMESTAMP": 1.0, "timestamp": 0.001}  # name → seconds per unit
_PROMPT = ("prompt_tokens", "ContextTokens", "input_length")
_OUTPUT = ("output_tokens", "GeneratedTokens", "output_length")


def read_trace(path: Path, speed: float = 1.0, limit: int | None = None) -> list[Arrival]:
    """The arrivals of a .csv (with header) or .jsonl file, in order of time, `speed` times as fast as recorded.

    Raises BenchError naming the file and the line that cannot be read.
    """
    arrivals: list[tuple[float, int, int]] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows: Iterable[dict[str, Any]] = (
                csv.DictReader(file) if path.suffix == ".csv" else (json.loads(line) for line in file if line.strip())
            )
            for row in rows:
                arrivals.append((_seconds(row), _tokens(row, _PROMPT), _tokens(row, _OUTPUT)))
                if limit is not None and len(arrivals) == limit:
                    break
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}, record {len(arrivals) + 1}: {error!r}") from error
    if not arrivals:
        raise BenchError(f"{path}: no record")
    arrivals.sort()
    first = arrivals[0][0]
    return [Arrival((at - first) / speed, prompt, output) for at, prompt, output in arrivals]


def _seconds(row: dict[str, Any]) -> float:
    for name, unit in _TIME.items():
        if name in row:
            value = row[name]
            if name == "TIMESTAMP" and not str(value).replace(".", "", 1).isdigit():
                return datetime.fromisoformat(str(value)).timestamp()
            return float(value) * unit
    raise ValueError(f"no time among the fields {list(row)}")


def _tokens(row: dict[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if name in row:
            return max(1, int(row[name]))
    raise ValueError(f"none of {', '.join(names)} among the fields {list(row)}")
