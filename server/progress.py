"""How far the start has come, for whoever looks at the terminal or the log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine.types import LoadProgress

logger = logging.getLogger("octavo")
Show = Callable[[LoadProgress], None]


@contextlib.contextmanager
def progress_shown(console: Console) -> Iterator[Show]:
    """A bar on a terminal, gone at the end; elsewhere a log line a stage."""
    if not console.is_terminal:
        yield _stage_logger()
        return
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True)
    task = bar.add_task("starting", total=1.0)

    def show(progress: LoadProgress) -> None:
        bar.update(task, completed=progress.fraction, description=progress.stage)
        if progress.fraction > 0:  # until then a download may draw a bar of its own
            bar.start()

    try:
        yield show
    finally:
        bar.stop()


def _stage_logger() -> Show:
    last = ""

    def log(progress: LoadProgress) -> None:
        nonlocal last
        if progress.stage != last:
            last = progress.stage
            logger.info("loading: %s", last)

    return log
