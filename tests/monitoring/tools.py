"""The Prometheus tools of the machine, if it has them."""

from __future__ import annotations

import shutil

import pytest


def tool(name: str) -> str:
    """The path of a program of Debian's package `prometheus`; without it the test is skipped."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return path
