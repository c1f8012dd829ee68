"""Every kernel of the package compiles for Hopper, without a card, and fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_kernel_compiles_for_hopper_within_its_registers_and_shared_memory() -> None:
    """In a process of its own: here the kernels belong to the interpreter. It fails where one spills or is missed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.triton.compile_report", "--quick", "--dtypes", "bfloat16"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["missing"] == []
    names = {kernel["name"] for kernel in report["kernels"]}
    assert {"decode_kernel", "prefill_kernel", "quantized_linear_kernel", "draw_kernel", "bound_kernel"} <= names
    assert all(kernel["shared_bytes"] <= 227 * 1024 and kernel["stack_bytes"] == 0 for kernel in report["kernels"])
