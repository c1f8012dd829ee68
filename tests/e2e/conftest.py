"""A server that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live import LiveServer, serving


@pytest.fixture(scope="session")
def slow_server(default_model_path: Path) -> Iterator[LiveServer]:
    """Scripted tokens, a step every 10 ms: answers last long enough to be interrupted."""
    with serving("--executor", "fake", "--fake-step-seconds", "0.01") as server:
        yield server
