"""Paged attention in Triton."""

from __future__ import annotations

import pytest

from kernels.interface import KernelSet
from tests.kernels.cases import ATTENTION_CASES, AttentionCase, check_attention


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_equals_the_formula(kernels_float32: KernelSet, case: AttentionCase) -> None:
    check_attention(kernels_float32, case)
