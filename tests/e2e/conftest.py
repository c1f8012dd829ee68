"""Servers that whole test sessions share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live import LiveServer, serving


@pytest.fixture(scope="session")
def live_server(default_model_path: Path) -> Iterator[LiveServer]:
    """The default model, served as a newcomer would."""
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def fake_server(default_model_path: Path) -> Iterator[LiveServer]:
    """Scripted tokens at full speed, in the default model's vocabulary."""
    with serving("--executor", "fake") as server:
        yield server


@pytest.fixture(scope="session")
def slow_server(default_model_path: Path) -> Iterator[LiveServer]:
    """Scripted tokens, a step every 10 ms: answers last long enough to be interrupted."""
    with serving("--executor", "fake", "--fake-step-seconds", "0.01") as server:
        yield server
