"""Two servers for this folder, stopped when its tests are done: the clients under test are the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live import LiveServer, serving

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="package")
def real_server(default_model_path: Path) -> Iterator[LiveServer]:
    """The default model, as a newcomer serves it."""
    with serving() as server:
        yield server


@pytest.fixture(scope="package")
def scripted_server(default_model_path: Path) -> Iterator[LiveServer]:
    """Scripted tokens at full speed, in the default model's vocabulary."""
    with serving("--executor", "fake") as server:
        yield server


@pytest.fixture(scope="session")
def model() -> str:
    """The name that the default model is served by."""
    return MODEL
