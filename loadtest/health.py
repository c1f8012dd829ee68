"""Is the load generator itself fit to measure? Its CPU, its event loop, and what else the machine does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from loadtest.connection import Clock
from loadtest.proc import TreeUse, busy_cpu_seconds, tree_use
from loadtest.report import ClientHealth, ServerUse

_BEAT_SECONDS = 0.02
_RSS_EVERY_BEATS = 50
MAX_CPU_SHARE = 0.8
MAX_LAG_SECONDS = 0.010


class HealthWatch:
    """Watches from `run()`'s start until it is cancelled; `server_pid` is the root of the server's processes."""

    def __init__(self, clock: Clock, server_pid: int | None = None) -> None:
        self._clock = clock
        self._server_pid = server_pid
        self._lags: list[float] = []
        self._began_at = clock()
        self._cpu_at_start = time.process_time()
        self._busy_at_start = busy_cpu_seconds()
        self._server_at_start = self._server()
        self._peak_rss_bytes = 0

    async def run(self) -> None:
        """Measures by how much short sleeps overshoot: what any answer may wait before it is read."""
        beat = 0
        while True:
            due = self._clock() + _BEAT_SECONDS
            await asyncio.sleep(_BEAT_SECONDS)
            self._lags.append(max(0.0, self._clock() - due))
            if beat % _RSS_EVERY_BEATS == 0 and (use := self._server()) is not None:
                self._peak_rss_bytes = max(self._peak_rss_bytes, use.rss_bytes)
            beat += 1

    def client(self, send_lags: Sequence[float]) -> ClientHealth:
        """The verdict; `send_lags` are seconds from when a request was due to when it was sent."""
        wall = max(self._clock() - self._began_at, 1e-9)
        cpu = time.process_time() - self._cpu_at_start
        loop_p99, loop_max = _p99_and_max(self._lags)
        send_p99, send_max = _p99_and_max(send_lags)
        warnings = []
        if cpu / wall > MAX_CPU_SHARE:
            warnings.append(f"the client used {cpu / wall:.0%} of a core: it may be what was measured")
        if loop_p99 > MAX_LAG_SECONDS:
            warnings.append(f"the client's event loop lagged {loop_p99 * 1e3:.0f} ms (p99): times are that coarse")
        if send_p99 > MAX_LAG_SECONDS:
            warnings.append(f"the client fell behind: requests left {send_p99 * 1e3:.0f} ms late (p99)")
        return ClientHealth(cpu, cpu / wall, loop_p99, loop_max, send_p99, send_max, tuple(warnings))

    def server(self) -> ServerUse:
        """Use by the server's process tree, and by processes that are neither it nor this one."""
        wall = max(self._clock() - self._began_at, 1e-9)
        now, busy = self._server(), busy_cpu_seconds()
        cpu = now.cpu_seconds - self._server_at_start.cpu_seconds if now and self._server_at_start else None
        foreign = None
        if cpu is not None and busy is not None and self._busy_at_start is not None:
            own = time.process_time() - self._cpu_at_start
            foreign = max(0.0, busy - self._busy_at_start - own - cpu) / wall
        return ServerUse(
            cpu_cores=None if cpu is None else cpu / wall,
            peak_rss_bytes=self._peak_rss_bytes or None,
            foreign_cpu_cores=foreign,
        )

    def _server(self) -> TreeUse | None:
        return tree_use(self._server_pid) if self._server_pid is not None else None


def _p99_and_max(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    data = np.asarray(values)
    return float(np.percentile(data, 99)), float(data.max())
