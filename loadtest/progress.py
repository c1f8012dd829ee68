"""A progress bar with live rates. Drawn seldom and by hand: a redraw must not cost the client its punctuality."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from loadtest.runner import Live

_EVERY_SECONDS = 0.5


class Progress(Protocol):
    """Shows runs as they go."""

    def note(self, text: str) -> None:
        """Says something between runs."""

    async def follow(self, title: str, live: Live) -> None:
        """Shows `live` under `title` until cancelled."""


class NoProgress:
    """For pipes, logs and tests."""

    def note(self, text: str) -> None:
        return None

    async def follow(self, title: str, live: Live) -> None:
        return None


class BarProgress:
    """One line: bar, requests ended, in flight, failures, requests and chunks per second just now."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False)

    async def follow(self, title: str, live: Live) -> None:
        bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rates]}"),
            console=self._console,
            auto_refresh=False,
        )
        task = bar.add_task(title, total=live.num_planned or None, rates="")
        ended, chunks, before = live.num_ended, live.num_chunks, time.perf_counter()
        with bar:
            try:
                while True:
                    await asyncio.sleep(_EVERY_SECONDS)
                    now = time.perf_counter()
                    rates = (
                        f"{live.num_in_flight} active · "
                        + (f"{live.num_failed} failed · " if live.num_failed else "")
                        + f"{(live.num_ended - ended) / (now - before):.1f} req/s · "
                        f"{(live.num_chunks - chunks) / (now - before):.0f} tok/s"
                    )
                    ended, chunks, before = live.num_ended, live.num_chunks, now
                    bar.update(task, completed=live.num_ended, total=live.num_planned or None, rates=rates)
                    bar.refresh()
            finally:
                bar.update(task, completed=live.num_ended, total=live.num_planned, rates="")
                bar.refresh()
