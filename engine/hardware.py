"""What this machine, or the container that we live in, lets us use: memory, processors, a GPU.

Every function reads a few small files below `root` ("/" but for tests) and never fails: what cannot be read counts
as no limit. On a system without /proc the figures come from sysconf.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What may be used, as found at start-up."""

    memory_available_bytes: int  # host memory: the least of the machine's and the cgroup's
    num_cpus: int  # logical processors: affinity and cgroup quota respected
    num_cores: int  # physical cores behind them; ≤ num_cpus
    has_cuda: bool
    device_memory_available_bytes: int | None = None  # of the GPU; None until somebody has measured it


def detect(root: Path = SYSTEM_ROOT) -> Hardware:
    """Read the machine. The GPU's memory stays None: asking needs a CUDA context, which the runner makes."""
    affinity = usable_cpus()
    num_cpus = num_usable_cpus(root)
    return Hardware(
        memory_available_bytes=available_memory_bytes(root),
        num_cpus=num_cpus,
        num_cores=min(num_cpus, num_physical_cores(affinity, root)),
        has_cuda=has_cuda(root),
    )


def available_memory_bytes(root: Path = SYSTEM_ROOT) -> int:
    """Memory that can still be taken: free or reclaimable in the machine, and within every cgroup above us."""
    return min([_machine_memory_bytes(root), *_cgroup_headrooms(root)])


def usable_cpus() -> frozenset[int]:
    """Logical processors that the scheduler may put us on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_usable_cpus(root: Path = SYSTEM_ROOT) -> int:
    """Affinity, cut by the cgroup's quota (rounded down, at least 1)."""
    quotas = [_read_quota(folder) for folder in _cgroup_folders(root, "cpu")]
    limits = [max(1, int(quota)) for quota in quotas if quota is not None]
    return min([len(usable_cpus()), *limits])


def num_physical_cores(cpus: frozenset[int], root: Path = SYSTEM_ROOT) -> int:
    """Cores behind these logical processors; where the topology cannot be read each counts as a core."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
        cores.add((package, core) if core is not None else (None, f"cpu{cpu}"))
    return len(cores)


def has_cuda(root: Path = SYSTEM_ROOT) -> bool:
    """Whether there is an NVIDIA device and a torch that could use it. Imports nothing."""
    if not (root / "dev/nvidia0").exists():
        return False
    try:
        return "+cpu" not in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def oom_kills(root: Path = SYSTEM_ROOT) -> int:
    """How many processes of our cgroup the kernel has killed for memory; 0 where it does not say."""
    total = 0
    for folder in _cgroup_folders(root, "memory")[:1]:
        for name in ("memory.events", "memory.oom_control"):
            total += _read_table(folder / name).get("oom_kill", 0)
    return total


def _machine_memory_bytes(root: Path) -> int:
    kilobytes = _read_table(root / "proc/meminfo").get("MemAvailable:")
    if kilobytes is not None:
        return kilobytes * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Limit less use for each cgroup that has a limit; files cached in memory count as free."""
    for folder in _cgroup_folders(root, "memory"):
        v2 = (folder / "memory.max").exists()
        limit = _read(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
        used = _read(folder / ("memory.current" if v2 else "memory.usage_in_bytes"))
        if limit is None or used is None or not limit.isdigit():  # "max": no limit
            continue
        reclaimable = _read_table(folder / "memory.stat").get("inactive_file" if v2 else "total_inactive_file", 0)
        yield max(0, int(limit) - int(used) + reclaimable)


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Our cgroup's folder and those above it, innermost first. In a container without a cgroup namespace the
    path named by /proc is not mounted; its own limits then stand at the mount's top."""
    unified = root / "sys/fs/cgroup"
    mount, path = unified, "/"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, where = line.split(":", 2)
        if controller in controllers.split(","):  # version 1: a hierarchy of its own
            mount, path = unified / controller, where
            break
        if not controllers:  # version 2
            path = where
    inner = mount / path.strip("/")
    folders = [inner, *inner.parents]
    return [folder for folder in folders if folder.is_relative_to(mount) and folder.is_dir()]


def _read_quota(folder: Path) -> float | None:
    """Processors' worth of time that a cgroup may use; None = unlimited."""
    limit = _read(folder / "cpu.max")
    if limit is not None:
        quota, period = limit.split()
    else:
        quota = _read(folder / "cpu.cfs_quota_us") or "-1"
        period = _read(folder / "cpu.cfs_period_us") or "100000"
    return int(quota) / int(period) if quota.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _read_table(path: Path) -> dict[str, int]:
    """Lines of "name number [unit]"."""
    rows = (line.split() for line in (_read(path) or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
