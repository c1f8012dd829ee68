"""Samples a server's /metrics while a run is on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from loadtest.client import Client
from loadtest.connection import Clock, ConnectionLost
from loadtest.metric_names import SOURCES
from loadtest.report import Series

_WANTED = tuple(sorted({source.metric for sources in SOURCES.values() for source in sources}))


def parse_metrics(text: str) -> dict[str, float]:
    """Figure → value for every figure that the page has. Raises ValueError for a page that is not Prometheus'."""
    # the library's parser is slow and a page may have thousands of lines: keep those that matter
    lines = [line for line in text.splitlines() if line.startswith(_WANTED)]
    samples = [
        sample for family in text_string_to_metric_families("\n".join(lines) + "\n") for sample in family.samples
    ]
    figures: dict[str, float] = {}
    for figure, sources in SOURCES.items():
        for source in sources:
            values = [
                sample.value
                for sample in samples
                if sample.name == source.metric and set(source.labels) <= set(sample.labels.items())
            ]
            if values:
                figures[figure] = sum(values)
                break
    return figures


class Scraper:
    """Collects samples every `interval_seconds` until cancelled; a server without /metrics yields none."""

    def __init__(self, client: Client, clock: Clock, interval_seconds: float = 0.5) -> None:
        self._client = client
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._samples: list[tuple[float, dict[str, float]]] = []

    async def run(self) -> None:
        """Samples until cancelled, or until the server answers anything but a page of metrics."""
        while True:
            # a busy or restarting server costs this sample; the next may come
            with contextlib.suppress(OSError, ConnectionLost):
                status, body = await self._client.fetch("GET", "/metrics")
                try:
                    figures = parse_metrics(body.decode("utf-8", "replace"))
                except ValueError:
                    return
                if status != 200:
                    return
                self._samples.append((self._clock(), figures))
            await asyncio.sleep(self._interval_seconds)

    def series(self, start: float) -> Series:
        """The samples with times counted from `start`."""
        return make_series([(time - start, figures) for time, figures in self._samples])


def make_series(samples: Iterable[tuple[float, dict[str, float]]]) -> Series:
    """Samples as columns; a figure missing from one sample is None there."""
    rows = [(time, figures) for time, figures in samples if figures]
    names = sorted({name for _, figures in rows for name in figures})
    return Series(
        times=tuple(round(time, 4) for time, _ in rows),
        values={name: tuple(figures.get(name) for _, figures in rows) for name in names},
    )
