"""Use and memory of NVIDIA GPUs, through NVML where there is one (the package nvidia-ml-py)."""

from __future__ import annotations

import importlib
from typing import Any

from monitoring.engine_state import Sample


class Accelerators:
    """The GPUs that NVML knows; none where it or its package is missing. Reading one takes well below a millisecond."""

    def __init__(self, nvml: Any) -> None:
        """`nvml` is the module pynvml or None."""
        self._nvml = nvml
        self._handles = [] if nvml is None else _handles(nvml)

    @classmethod
    def detect(cls) -> Accelerators:
        """Those of this machine."""
        try:
            return cls(importlib.import_module("pynvml"))
        except ImportError:
            return cls(None)

    def samples(self) -> list[Sample]:
        """Three a device, labelled with its number; a device that cannot be read now is left out."""
        found: list[Sample] = []
        for number, handle in enumerate(self._handles):
            device = (str(number),)
            try:
                busy_percent = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._nvml.NVMLError:
                continue
            found.append(Sample("accelerator_utilization_ratio", device, busy_percent / 100))
            found.append(Sample("accelerator_memory_used_bytes", device, memory.used))
            found.append(Sample("accelerator_memory_total_bytes", device, memory.total))
        return found


def _handles(nvml: Any) -> list[Any]:
    try:
        nvml.nvmlInit()
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:  # no driver, or no right to ask it
        return []
