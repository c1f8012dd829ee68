"""Order statistics and curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from loadtest.summary import Distribution


def distribution(values: Iterable[float]) -> Distribution | None:
    """The distribution of `values`; None if there are none."""
    data = np.fromiter(values, dtype=np.float64)
    if not data.size:
        return None
    percentiles = np.percentile(data, np.arange(101))
    return Distribution(
        count=int(data.size),
        mean=float(data.mean()),
        min=float(percentiles[0]),
        max=float(percentiles[100]),
        p50=float(percentiles[50]),
        p90=float(percentiles[90]),
        p95=float(percentiles[95]),
        p99=float(percentiles[99]),
        percentiles=tuple(float(value) for value in percentiles),
    )


def concurrency(intervals: Sequence[tuple[float, float]]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """How many of the half-open intervals hold at once: (times, number from that time on).

    times [2 × intervals], ascending; at equal times ends come before begins.
    """
    events = sorted([(end, -1) for _, end in intervals] + [(begin, 1) for begin, _ in intervals])
    times = np.array([time for time, _ in events], dtype=np.float64)
    return times, np.cumsum(np.array([step for _, step in events], dtype=np.int64))


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least-squares slope; 0 where it is not defined."""
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    if x.size < 2:
        return 0.0
    x = x - x.mean()
    spread = float(x @ x)
    return float(x @ (y - y.mean())) / spread if spread > 0 else 0.0
