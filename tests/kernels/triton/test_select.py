"""The Triton kernels by name, and what they say where they cannot run."""

from __future__ import annotations

import pytest

from kernels.interface import DType
from kernels.select import select


def test_by_name_in_the_interpreter() -> None:
    kernels = select("cpu", DType.FLOAT32, "triton")
    assert kernels.name == "triton"
    assert kernels.description.startswith("triton ")


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="run on cuda"):
        select("cpu", DType.FLOAT32, "triton")
