"""What the clients call the default model."""

from __future__ import annotations

import pytest

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def model() -> str:
    """The name that the default model is served by."""
    return MODEL
