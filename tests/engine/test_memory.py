"""A process gives back what loading has freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# 200 MB in pieces that the C library takes from its heap, and one more above them that keeps the heap from shrinking
CHILD = """
import resource
from engine.memory import settle_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

before = resident()
pieces = [bytearray(100_000) for _ in range(2000)]
above = bytearray(100_000)
del pieces
freed = resident()
settle_memory()
print((freed - before) // 10**6, (resident() - before) // 10**6)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library gives memory back by itself, or never")
def test_freed_memory_goes_back_to_the_system() -> None:
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    freed, settled = map(int, child.stdout.split())
    assert freed > 150
    assert settled < 20
