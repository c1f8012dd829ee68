"""Fixtures of the Triton kernels' tests. Without a GPU the kernels run in the interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.interface import DType, KernelSet

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if importlib.util.find_spec("triton") is None:  # there are none for this system
    collect_ignore_glob = ["test_*.py"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """NaN and infinities that a GPU computes with in silence make numpy, beneath the interpreter, warn."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


def _kernels(dtype: DType) -> KernelSet:
    from kernels.triton.triton_kernels import TritonKernels

    return TritonKernels(device=DEVICE, dtype=dtype, num_threads=1)


@pytest.fixture
def make_kernels() -> Callable[[DType], KernelSet]:
    """New Triton kernels of a type of activations."""
    return _kernels


@pytest.fixture(scope="session", params=[DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16], ids=str)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    """The Triton kernels in each type of activations."""
    return _kernels(request.param)


@pytest.fixture(scope="session")
def kernels_float32() -> KernelSet:
    return _kernels(DType.FLOAT32)


@pytest.fixture(scope="session")
def kernels_bfloat16() -> KernelSet:
    return _kernels(DType.BFLOAT16)


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session")
def reference(kernels: KernelSet) -> KernelSet:
    """The name by which the reference's tests, run here again, ask for the kernels under test."""
    return kernels


@pytest.fixture(scope="session")
def reference_float32(kernels_float32: KernelSet) -> KernelSet:
    return kernels_float32
