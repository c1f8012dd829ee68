"""CPU time and memory of processes, from Linux' /proc. Elsewhere every figure is None."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class TreeUse:
    """A process with all its descendants."""

    cpu_seconds: float  # of the living, and of those that they have waited for
    rss_bytes: int  # shared pages count once per process


def tree_use(pid: int) -> TreeUse | None:
    """Use of the process tree rooted at `pid`; None if it is gone or there is no /proc."""
    stats = {process: fields for process, _, fields in _all_stats()}
    if pid not in stats:
        return None
    tree, front = {pid}, {pid}
    while front:
        front = {child for child, fields in stats.items() if int(fields[1]) in front} - tree
        tree |= front
    # fields count from the state: utime, stime, cutime, cstime are 11 … 14, rss is 21
    cpu_ticks = sum(int(ticks) for member in tree for ticks in stats[member][11:15])
    return TreeUse(cpu_ticks * _TICK_SECONDS, sum(int(stats[member][21]) for member in tree) * _PAGE_BYTES)


def process_cpu_seconds(pid: int) -> dict[str, float]:
    """CPU seconds of a process, under the name "server", and of each of its living children, by their names. {} where
    there is no /proc."""
    return {
        "server" if process == pid else name: sum(int(ticks) for ticks in fields[11:13]) * _TICK_SECONDS
        for process, name, fields in _all_stats()
        if process == pid or int(fields[1]) == pid
    }


def busy_cpu_seconds() -> float | None:
    """CPU seconds that the whole machine has been busy since boot; None without /proc."""
    try:
        fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + softirq) * _TICK_SECONDS


def _all_stats() -> Iterator[tuple[int, str, list[str]]]:
    """Process id, name, and the fields of /proc/PID/stat from the state on."""
    if not _PROC.is_dir():
        return
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                # the command name in brackets may itself hold spaces and brackets
                command, _, fields = (entry / "stat").read_text().rpartition(")")
                yield int(entry.name), command.partition("(")[2], fields.split()
            except OSError:
                continue  # ended while we looked
