"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest
import torch

from kernels.interface import DType, KernelSet
from kernels.reference.torch_kernels import TorchKernels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch has no GPU here")
    return str(request.param)


@pytest.fixture(scope="session", params=[DType.FLOAT32, DType.BFLOAT16], ids=str)
def reference(request: pytest.FixtureRequest, device: str) -> KernelSet:
    """The torch kernels in both types."""
    return TorchKernels(device=device, dtype=request.param, num_threads=1)


@pytest.fixture(scope="session")
def reference_float32(device: str) -> KernelSet:
    return TorchKernels(device=device, dtype=DType.FLOAT32, num_threads=1)
