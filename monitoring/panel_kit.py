"""What panels are made of, and the expressions that many of them share.

In an expression `{I}` (or `{I,label="x"}`) stands for the filter on the chosen instances, `[R]` for the range of rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PanelKind = Literal["timeseries", "stat", "heatmap"]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and its legend."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `width` is of 24 columns."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: PanelKind = "timeseries"
    width: int = 8
    stacked: bool = False
    steps: tuple[tuple[str, float | None], ...] = ()  # colour from a value on, for stats
    needs: str = ""  # the part of a machine that it measures, if not all have it


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: tuple[Panel, ...]


def sum_rate(series: str, by: str = "") -> str:
    """The rate of a counter, added up over instances."""
    return f"sum{f' by ({by})' if by else ''} (rate({series}[R]))"


def quantiles(histogram: str) -> tuple[Query, ...]:
    """p50, p95, p99."""
    buckets = sum_rate(histogram + "_bucket{I}", "le")
    return tuple(Query(f"histogram_quantile({q}, {buckets})", f"p{round(q * 100)}") for q in (0.5, 0.95, 0.99))


def mean(histogram: str) -> str:
    """Of a histogram's observations."""
    return f"{sum_rate(histogram + '_sum{I}')} / {sum_rate(histogram + '_count{I}')}"


def in_time(histogram: str, le: str) -> tuple[Query, ...]:
    """The share of observations up to a bucket's bound."""
    fast = sum_rate(histogram + '_bucket{I,le="' + le + '"}')
    return (Query(f"{fast} / {sum_rate(histogram + '_count{I}')}"),)


def share(objective: float) -> tuple[tuple[str, float | None], ...]:
    """Colours around an objective."""
    return (("red", None), ("orange", objective - 0.05), ("green", objective))


def heatmap(title: str, histogram: str, unit: str, description: str) -> Panel:
    """How a histogram's observations spread, over time."""
    return Panel(title, description, (Query(sum_rate(histogram + "_bucket{I}", "le"), "{{le}}"),), unit, "heatmap")
