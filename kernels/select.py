"""Choosing the kernels, once, at start-up."""

from __future__ import annotations

from kernels.interface import DType, KernelSet

NAMES = ("auto", "torch", "native", "triton")


def select(device: str, dtype: DType, name: str = "auto", num_threads: int = 1) -> KernelSet:
    """The KernelSet for a device ("cpu", "cuda"), a compute dtype and a name of NAMES.

    Raises ValueError when the named kernels cannot run here; the message says why and what to install.
    """
    if name == "auto":
        name = "torch"
    if name == "torch":
        try:
            from kernels.reference.torch_kernels import TorchKernels
        except ImportError as error:
            raise ValueError(f"the torch kernels need torch: pip install 'octavo[torch]' ({error})") from error
        return TorchKernels(device=device, dtype=dtype, num_threads=num_threads)
    raise ValueError(f"unknown kernels {name!r}: choose one of {', '.join(NAMES)}")
