"""Which native kernels the tests run: every instruction set of this machine, one to four threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.interface import Array, DType, KernelSet
from tests.kernels.cases import Floats

native = pytest.importorskip("kernels.native._native", reason="the native kernels are not built")
from kernels.native.native_kernels import NativeKernels  # noqa: E402

ISAS = tuple(native.available_isas().split(", "))
EVERY_ISA = [pytest.param(isa, id=isa) for isa in ISAS]
EVERY_ISA_AND_THREADS = [
    pytest.param(isa, threads, id=f"{isa}-{threads}")
    for isa in ISAS
    for threads in ((1, 3) if isa != ISAS[-1] else (1, 2, 3, 4))
]


def kernels_for(isa: str, threads: int = 1, dtype: DType = DType.FLOAT32) -> NativeKernels:
    return NativeKernels(dtype, threads, isa)


def linear(kernels: KernelSet, x: Floats, weight: Array) -> Floats:
    """One product into a fresh buffer."""
    out = kernels.empty((len(x), weight.shape[0]), DType.FLOAT32)
    kernels.linear(kernels.upload(x), weight, out)
    return np.asarray(kernels.download(out))


def same_bits(actual: Any, expected: Any) -> None:
    """Equal as bit patterns: −0 is not 0."""
    got, want = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
