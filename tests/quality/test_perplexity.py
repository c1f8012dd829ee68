"""What quantised weights and caches cost in perplexity."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quality.perplexity import VARIANTS, Variant, of_engine, of_transformers, windows

pytest.importorskip("kernels.native._native", reason="the native kernels are not built")


def test_a_few_windows_cost_about_what_the_bits_do(default_model_path: Path) -> None:
    """Too short a text for the targets: a part of it that went wrong would show all the same."""
    pieces = windows(default_model_path, 1024, window=512)
    plain, small, own = (
        of_engine(default_model_path, variant, pieces, 2, "native").perplexity
        for variant in (Variant("", "none"), Variant("", "int8", int8_kv=True), Variant("", "auto"))
    )
    assert 5 < plain < 100
    assert small == pytest.approx(plain, rel=0.02)
    assert own == pytest.approx(plain, rel=0.02)


@pytest.mark.slow
def test_the_targets_on_fifty_thousand_tokens(default_model_path: Path) -> None:
    pieces = windows(default_model_path, 50_000)
    reference = of_transformers(default_model_path, pieces, 2).perplexity
    scores = {v.label: of_engine(default_model_path, v, pieces, 2, "native").perplexity for v in VARIANTS}
    assert scores["bfloat16"] == pytest.approx(reference, rel=0.001)
    assert scores["int8"] == pytest.approx(reference, rel=0.005)
    assert scores["GGUF Q4_1 as it is"] == pytest.approx(reference, rel=0.005)
    for variant in VARIANTS:
        if variant.int8_kv:
            assert scores[variant.label] == pytest.approx(scores[variant.name], rel=0.003)
