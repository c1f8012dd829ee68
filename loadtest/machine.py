"""What the figures were measured on."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from msgspec import Struct

_READ_BYTES = 256 << 20  # well beyond any last-level cache's share
_READ_ROUNDS = 5


class Machine(Struct, frozen=True):
    """The machine, and its measured ceiling for memory-bound work."""

    cpu: str
    num_cpus: int  # that this process may use
    memory_bytes: int
    system: str
    python: str
    read_bytes_per_second: float | None = None  # best of a few runs of a plain sum, all CPUs


def describe_machine(*, measure_bandwidth: bool = False) -> Machine:
    """The machine's description; measuring the bandwidth takes about a second and 256 MiB."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        cpu=_cpu_name(),
        num_cpus=num_cpus,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        read_bytes_per_second=_read_bandwidth(num_cpus) if measure_bandwidth else None,
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _read_bandwidth(num_threads: int) -> float:
    parts = np.array_split(np.ones(_READ_BYTES // 8, dtype=np.int64), num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        seconds = []
        for _ in range(_READ_ROUNDS):
            begin = time.perf_counter()
            list(pool.map(np.sum, parts))  # numpy lets go of the interpreter lock while it sums
            seconds.append(time.perf_counter() - begin)
    return _READ_BYTES / min(seconds)
