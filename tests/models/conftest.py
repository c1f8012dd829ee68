"""Fixtures of the models' tests."""

from __future__ import annotations

import pytest
from transformers.utils import logging

from kernels.interface import DType, KernelSet
from kernels.select import select


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session", params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    """Float32 kernels, each backend that computes on a CPU."""
    try:
        return select("cpu", DType.FLOAT32, request.param)
    except ValueError as error:
        pytest.skip(str(error))
