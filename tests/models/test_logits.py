"""Logits equal transformers' in float32, for every family and every RoPE scaling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.models.loader import load_model, open_model
from kernels.interface import KernelSet
from tests.models.cases import FAMILIES, SCALINGS
from tests.models.driver import Driver
from tests.models.tiny import PROMPT_LENGTH, TinyModel, reference_logits, save

TOLERANCE = 1e-4


@pytest.mark.parametrize("tiny", FAMILIES + SCALINGS, ids=lambda tiny: tiny.name)
def test_logits_equal_transformers_whole_chunked_and_token_by_token(
    tiny: TinyModel, kernels: KernelSet, tmp_path: Path
) -> None:
    model = tiny.build()
    expected = reference_logits(model, tiny.prompt)
    opened = open_model(save(model, tmp_path))
    decoder = load_model(opened, kernels, max_model_len=tiny.prompt_length, max_num_batched_tokens=PROMPT_LENGTH)
    driver = Driver(decoder, kernels)
    assert np.abs(expected).max() > 1, "logits this small would make the comparison worthless"
    for seq, chunk in enumerate((None, 7, 1)):
        actual = driver.run(seq, tiny.prompt, chunk)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
