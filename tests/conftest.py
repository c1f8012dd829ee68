"""Fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from server import model_store


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's .gguf file; fetched into the cache by the first test that asks."""
    return model_store.packaged_model_path()


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M's .gguf file, as the default model's; for slow tests."""
    return model_store.packaged_model_path("gemma-3-270m")
