"""What a process does about its memory once everything is loaded."""

from __future__ import annotations

import ctypes
import gc


def settle_memory() -> None:
    """What has been loaded stays: the collector need not walk it again. What loading has freed goes back to the
    system."""
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc keeps freed memory until asked; others have no such function
        libc.malloc_trim(0)
