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


def test_batch_invariance_is_asked_for_and_told() -> None:
    """Not only the flag: other arithmetic has another description, and so another system fingerprint."""
    plain, invariant = (
        select("cpu", DType.FLOAT32, "triton", batch_invariant=batch_invariant) for batch_invariant in (False, True)
    )
    assert not plain.batch_invariant
    assert invariant.batch_invariant
    assert plain.description != invariant.description


def test_batch_invariance_is_accepted_where_it_always_holds_and_refused_where_it_cannot() -> None:
    native = select("cpu", DType.FLOAT32, "native", batch_invariant=True)
    assert native.batch_invariant
    native.close()
    with pytest.raises(ValueError, match="depend on the batch"):
        select("cpu", DType.FLOAT32, "torch", batch_invariant=True)
