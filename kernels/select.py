"""Choosing the kernels, once, at start-up."""

from __future__ import annotations

import importlib.util
import logging
import os

from kernels.interface import DType, KernelSet

NAMES = ("auto", "torch", "native", "triton")
_REBUILD = "install a C++17 compiler and run pip install . again"
_INVARIANT = "choose the native kernels on a CPU, Triton's on a GPU"
_TORCH = "pip install 'octavo[torch]'"

_log = logging.getLogger(__name__)


def select(
    device: str, dtype: DType, name: str = "auto", num_threads: int = 1, batch_invariant: bool = False
) -> KernelSet:
    """The KernelSet for a device ("cpu", "cuda"), a compute dtype and a name of NAMES.

    "auto" takes the native kernels on a CPU where they are built and Triton's on a GPU where it is installed, and says
    so in one line where it has to fall back.
    `batch_invariant` asks for results that do not depend on what else is in the batch: the native kernels always give
    them, Triton's by slower products.
    Raises ValueError when the named kernels cannot run here; the message says why and what to install.
    """
    if name == "auto":
        name = _automatic(device)
    if name == "native":
        return _native(device, dtype, num_threads)
    if name == "triton":
        return _triton(device, dtype, num_threads, batch_invariant)
    if name == "torch":
        if batch_invariant:
            raise ValueError(f"the torch kernels' results depend on the batch; {_INVARIANT}")
        # Read when torch loads OpenMP: its threads otherwise spin at every barrier, and where the server process or a
        # neighbour wants one of the processors a step takes ten times as long.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        try:
            from kernels.reference.torch_kernels import TorchKernels
        except ImportError as error:
            raise ValueError(f"the torch kernels need torch: {_TORCH} ({error})") from error
        return TorchKernels(device=device, dtype=dtype, num_threads=num_threads)
    raise ValueError(f"unknown kernels {name!r}: choose one of {', '.join(NAMES)}")


def _automatic(device: str) -> str:
    if device != "cpu":
        if importlib.util.find_spec("triton") is not None:
            return "triton"
        _log.warning("triton is not installed (pip install 'octavo[gpu]'): using the slower torch kernels")
        return "torch"
    try:
        import kernels.native.native_kernels  # noqa: F401
    except ImportError as error:
        if importlib.util.find_spec("torch") is None:
            raise ValueError(f"the native kernels are not built ({error}): {_REBUILD}, or {_TORCH}") from error
        _log.warning("native kernels are not built (%s): using the slower torch kernels; %s", error, _REBUILD)
        return "torch"
    return "native"


def _native(device: str, dtype: DType, num_threads: int) -> KernelSet:
    if device != "cpu":
        raise ValueError(f"the native kernels run on cpu, not on {device}")
    try:
        from kernels.native.native_kernels import NativeKernels
    except ImportError as error:
        raise ValueError(f"the native kernels are not built ({error}): {_REBUILD}") from error
    return NativeKernels(dtype=dtype, num_threads=num_threads)


def _triton(device: str, dtype: DType, num_threads: int, batch_invariant: bool) -> KernelSet:
    try:
        from kernels.triton.triton_kernels import TritonKernels
    except ImportError as error:
        raise ValueError(f"the Triton kernels need torch and triton: pip install 'octavo[gpu]' ({error})") from error
    return TritonKernels(device=device, dtype=dtype, num_threads=num_threads, batch_invariant=batch_invariant)
