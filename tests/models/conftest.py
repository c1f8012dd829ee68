"""Fixtures of the models' tests."""

from __future__ import annotations

import pytest
import torch
from transformers.utils import logging

from kernels.interface import DType, KernelSet
from kernels.reference.torch_kernels import TorchKernels


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def kernels() -> KernelSet:
    """The float32 reference kernels."""
    torch.set_num_threads(1)
    return TorchKernels(device="cpu", dtype=DType.FLOAT32, num_threads=1)
