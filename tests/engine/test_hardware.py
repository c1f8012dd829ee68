"""Reading the machine from a made-up file tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import hardware
from engine.hardware import available_memory_bytes, detect, num_physical_cores, num_usable_cpus, oom_kills

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal:       {32 * 2**20} kB\nMemAvailable:   {16 * 2**20} kB\n"}


def test_without_cgroups_the_machine_decides(tmp_path: Path) -> None:
    assert available_memory_bytes(write(tmp_path, MEMINFO)) == 16 * GIB


def test_version_2_takes_the_tightest_level_and_counts_cached_files_as_free(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/memory.current": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/container/memory.events": "low 0\noom 3\noom_kill 2\n",
            "sys/fs/cgroup/pod/container/cpu.max": "250000 100000\n",
        },
    )
    assert available_memory_bytes(root) == 4 * GIB  # 8 − 5 + 1
    assert oom_kills(root) == 2


def test_version_1_reads_the_hierarchies_of_each_controller(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "4:memory:/jobs\n1:cpu,cpuacct:/\n0::/\n",
            "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/jobs/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    assert available_memory_bytes(root) == 2 * GIB
    assert oom_kills(root) == 1


def test_a_container_that_does_not_see_its_path_reads_the_top_of_the_mount(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        },
    )
    assert available_memory_bytes(root) == GIB


@pytest.mark.parametrize(("quota", "expected"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 4)])
def test_the_quota_is_rounded_down_to_whole_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(hardware, "usable_cpus", lambda: frozenset(range(4)))
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota})
    assert num_usable_cpus(root) == expected


def test_hyperthreads_of_one_core_count_once(tmp_path: Path) -> None:
    topology = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": str(value)
        for cpu in range(4)
        for name, value in (("physical_package_id", 0), ("core_id", cpu % 2))
    }
    assert num_physical_cores(frozenset(range(4)), write(tmp_path, topology)) == 2


def test_an_unreadable_topology_counts_each_processor(tmp_path: Path) -> None:
    assert num_physical_cores(frozenset({0, 5}), tmp_path) == 2


def test_this_machine_can_be_read() -> None:
    found = detect()
    assert found.memory_available_bytes > 0
    assert 1 <= found.num_cores <= found.num_cpus
