"""Finds the knee: the highest arrival rate at which the objective is still kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from loadtest.report import RunReport


def keeps(report: RunReport, attainment: float) -> bool:
    """Whether enough of the run's requests were within its objective."""
    goodput = report.summary.goodput
    return goodput is not None and goodput.share >= attainment


async def find_knee(
    run_at: Callable[[float], Awaitable[RunReport]], first_rate: float, attainment: float, max_runs: int
) -> tuple[dict[float, RunReport], float | None]:
    """Doubles the rate from `first_rate` until the objective is missed, then halves the interval.

    Returns the runs by rate, ascending, and the highest rate that kept the objective (None if none did). At
    most `max_runs` runs.
    """
    runs: dict[float, RunReport] = {}
    good: float | None = None
    bad: float | None = None
    rate = first_rate
    for _ in range(max_runs):
        runs[rate] = await run_at(rate)
        if keeps(runs[rate], attainment):
            good = rate
        else:
            bad = rate
        rate = 2 * rate if bad is None else round(((good or 0.0) + bad) / 2, 3)
    return dict(sorted(runs.items())), good
