#!/usr/bin/env python3
"""Previews of the Grafana dashboard, one PNG a row, drawn with matplotlib from the data of a running Prometheus.

    python scripts/panel_previews.py http://127.0.0.1:9090 docs/images

For looking at the dashboard where Grafana is not at hand; Grafana itself draws it better.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import httpx
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from monitoring.dashboard import plain_expr
from monitoring.panel_kit import Panel, Query, Row
from monitoring.panels import ROWS

Series = list[tuple[dict[str, str], list[float], list[float]]]  # labels, seconds, values
_COLUMNS = 3
_POINTS = 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prometheus", help="its URL")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--seconds", type=int, default=120, help="how far back to look")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    end = time.time()
    for row in ROWS:
        name = "dashboard-" + "-".join(row.title.lower().strip("?").split()) + ".png"
        _draw_row(row, options.prometheus, end - options.seconds, end, options.folder / name)
        print(options.folder / name)  # noqa: T201


def _draw_row(row: Row, prometheus: str, start: float, end: float, path: Path) -> None:
    shown = (not panel.needs or bool(_fetch(prometheus, panel.queries[0], start, end)) for panel in row.panels)
    panels = list(compress(row.panels, shown))
    stats = [panel for panel in panels if panel.kind == "stat"]
    others = [panel for panel in panels if panel.kind != "stat"]
    lines = math.ceil(len(others) / _COLUMNS)
    figure = plt.figure(figsize=(15, 2.7 * lines + bool(stats)), layout="constrained")
    figure.suptitle(row.title, fontweight="bold")
    places: list[Axes] = []
    below: FigureBase = figure
    if stats:
        above, below = np.asarray(figure.subfigures(2, 1, height_ratios=[1, 2.7 * lines]), dtype=object).flat
        places += above.subplots(1, len(stats), squeeze=False).flat
    grid = below.subplots(lines, _COLUMNS, squeeze=False)
    for axes, panel in zip([*places, *grid.flat], [*stats, *others], strict=False):
        axes.set_title(panel.title, fontsize=9)
        axes.tick_params(labelsize=7)
        found = [(query, _fetch(prometheus, query, start, end)) for query in panel.queries]
        match panel.kind:
            case "stat":
                _draw_stat(axes, panel, found[0][1])
            case "heatmap":
                _draw_heatmap(axes, found[0][1])
            case "timeseries":
                _draw_lines(axes, panel, found)
    for axes in grid.flat[len(others) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=70)
    plt.close(figure)


def _fetch(prometheus: str, query: Query, start: float, end: float) -> Series:
    parameters: dict[str, Any] = {
        "query": plain_expr(query.expr, max(15, round((end - start) / 8))),
        "start": start,
        "end": end,
        "step": (end - start) / _POINTS,
    }
    response = httpx.get(f"{prometheus}/api/v1/query_range", params=parameters, timeout=60)
    response.raise_for_status()
    return [
        (found["metric"], [t - end for t, _ in found["values"]], [float(v) for _, v in found["values"]])
        for found in response.json()["data"]["result"]
    ]


def _legend(query: Query, labels: dict[str, str]) -> str:
    text = query.legend
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def _draw_lines(axes: Axes, panel: Panel, found: Sequence[tuple[Query, Series]]) -> None:
    drawn = [(_legend(query, labels), times, values) for query, series in found for labels, times, values in series]
    if panel.stacked and drawn:
        longest = max((times for _, times, _ in drawn), key=len)
        columns = [dict(zip(times, values, strict=True)) for _, times, values in drawn]
        filled = [[_number(column.get(t, 0.0)) for t in longest] for column in columns]
        axes.stackplot(longest, filled, labels=[name for name, _, _ in drawn], alpha=0.7)
    else:
        for name, times, values in drawn:
            axes.plot(times, values, label=name, linewidth=1)
    if panel.unit == "percentunit":
        axes.set_ylim(0, 1.05)
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(panel.unit if panel.unit != "short" else "", fontsize=7)
    if any(name for name, _, _ in drawn):
        axes.legend(fontsize=6, loc="upper left", ncols=2)


def _number(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _draw_stat(axes: Axes, panel: Panel, series: Series) -> None:
    axes.set_axis_off()
    value = series[0][2][-1] if series else math.nan
    color = next((color for color, start in reversed(panel.steps) if start is None or value >= start), "blue")
    text = f"{value:.2%}" if panel.unit == "percentunit" else f"{value:,.1f}"
    axes.text(0.5, 0.45, text, fontsize=22, ha="center", va="center", color=f"tab:{color}", transform=axes.transAxes)


def _draw_heatmap(axes: Axes, series: Series) -> None:
    bounded = sorted((float(labels["le"]), times, values) for labels, times, values in series)
    if not bounded:
        return
    times = bounded[-1][1]
    cumulative = [dict(zip(own, values, strict=True)) for _, own, values in bounded]
    rows = []
    for index, column in enumerate(cumulative):
        below = cumulative[index - 1] if index else {}
        rows.append([max(0.0, column.get(t, 0.0) - below.get(t, 0.0)) for t in times])
    used = [index for index, row in enumerate(rows) if any(row)]
    low, high = (max(0, used[0] - 1), used[-1] + 1) if used else (0, len(rows))
    axes.pcolormesh(times, range(high - low), rows[low:high], cmap="Oranges", shading="nearest")
    axes.set_yticks(range(high - low), [f"{bound:g}" for bound, _, _ in bounded[low:high]], fontsize=6)


if __name__ == "__main__":
    main()
