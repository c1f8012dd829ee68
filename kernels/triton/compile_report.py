"""Every Triton kernel of the package compiled for Hopper (sm_90), where no card is.

Run it by `python -m kernels.triton.compile_report`. The kernels are launched as the KernelSet launches them, but only
compiled: what is reported is what a server on a card would run. One line for each: registers a thread, shared memory of
a program, bytes of stack (for what the registers did not hold); the most of them where alignments make variants. The
last line is JSON. The exit status is 1 where a kernel needs more than a multiprocessor has, or any stack.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import kernels.triton as package
from kernels.interface import DType
from kernels.triton.launches import KernelsOnPaper, launch_all

TARGET = GPUTarget("cuda", 90, 32)
MOST_SHARED_BYTES = 227 << 10  # that a program can have on Hopper
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel needs, in one configuration."""

    name: str
    configuration: str  # its types and constants
    num_warps: int
    registers: int
    shared_bytes: int
    stack_bytes: int

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= MOST_SHARED_BYTES and self.stack_bytes == 0


class _NoDevice:
    """In place of Triton's driver: a Hopper card to compile for, and none to run on."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_launches(launches: Callable[[], None]) -> list[Compiled]:
    """The kernels that `launches` would run, each configuration once. Not in the interpreter."""
    seen: set[str] = set()
    reports: dict[tuple[str, str, int], Compiled] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            report = _report(self, compiled)
            key = report.name, report.configuration, report.num_warps
            reports[key] = max(report, reports.get(key, report), key=_needs)
        return compiled

    triton.runtime.driver.set_active(_NoDevice())  # for good: without a card there is none to go back to
    JITFunction.run = compile_only
    try:
        launches()
    finally:
        JITFunction.run = run
    return list(reports.values())


def _needs(report: Compiled) -> tuple[int, int, int]:
    return report.stack_bytes, report.shared_bytes, report.registers


def _report(function: Any, compiled: Any) -> Compiled:
    registers, stack_bytes = _resources(compiled.asm["cubin"])
    return Compiled(
        name=function.__name__,
        configuration=_configuration(function, compiled.src),
        num_warps=compiled.metadata.num_warps,
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        stack_bytes=stack_bytes,
    )


def _configuration(function: Any, source: Any) -> str:
    """The types of the arrays, each once, and the constants."""
    types = dict.fromkeys(kind[1:] for kind in source.signature.values() if kind.startswith("*"))
    constants = [
        f"{parameter.name}={source.constants[(index,)]}"
        for index, parameter in enumerate(function.params)
        if parameter.is_constexpr
    ]
    return " ".join([",".join(types), *constants])


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as CUDA's own tool, which comes with Triton, reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", file.name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = _RESOURCES.search(output)
    if found is None:
        raise ValueError(f"{tool} said nothing of registers: {output}")
    return int(found[1]), int(found[2])


def kernels_of_the_package() -> set[str]:
    """The names of all functions that are launched: those that end in _kernel."""
    names = (module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))
    return {
        name
        for module in map(importlib.import_module, names)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="kernels.triton.compile_report", description=__doc__)
    parser.add_argument("--dtypes", default="bfloat16,float16,float32", help="of the activations, with commas")
    parser.add_argument("--quick", action="store_true", help="one configuration of each kind")
    options = parser.parse_args()
    reports: list[Compiled] = []
    for dtype in options.dtypes.split(","):
        on_paper = KernelsOnPaper(DType(dtype))
        reports += compile_launches(partial(launch_all, on_paper, options.quick))
    _say(f"{'kernel':28} {'warps':>5} {'registers':>9} {'shared':>8} {'stack':>6}  configuration")
    for report in sorted(reports, key=lambda report: report.name):
        _say(
            f"{report.name:28} {report.num_warps:5} {report.registers:9} {report.shared_bytes:8} "
            f"{report.stack_bytes:6}  {report.configuration}{'' if report.fits else '  <- DOES NOT FIT'}"
        )
    missing = sorted(kernels_of_the_package() - {report.name for report in reports})
    _say(f"{len(reports)} configurations of {len({report.name for report in reports})} kernels for sm_90")
    if missing:
        _say(f"never launched: {', '.join(missing)}")
    _say(json.dumps({"missing": missing, "kernels": [asdict(report) for report in reports]}))
    return 1 if missing or not all(report.fits for report in reports) else 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 is set: the interpreter compiles nothing")
    sys.exit(main())
