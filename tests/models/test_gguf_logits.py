"""The same weights as GGUF give the same logits: names, row orders, offsets, metadata, quantised types."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from engine.errors import ModelError
from engine.models.loader import load_model, open_model
from kernels.interface import KernelSet
from tests.models.cases import FAMILIES, SCALINGS
from tests.models.driver import Driver
from tests.models.tiny import PROMPT_LENGTH, TinyModel, reference_logits
from tests.models.to_gguf import write_gguf

TOLERANCE = 1e-4
IN_GGUF = [tiny for tiny in FAMILIES + SCALINGS if tiny.in_gguf]
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}


@pytest.mark.parametrize("tiny", IN_GGUF, ids=lambda tiny: tiny.name)
def test_logits_equal_transformers(tiny: TinyModel, kernels: KernelSet, tmp_path: Path) -> None:
    model = tiny.build()
    path = write_gguf(model, tmp_path / "model.gguf")
    _assert_same_logits(tiny, model, path, kernels)


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("model_type", ["llama", "mixtral", "phi3"])
def test_quantised_weights_equal_transformers_on_the_dequantised(
    quantization: str, model_type: str, kernels: KernelSet, tmp_path: Path
) -> None:
    tiny = TinyModel(f"{model_type}-{quantization}", model_type, WIDE)
    model = tiny.build()
    path = write_gguf(model, tmp_path / "model.gguf", quantization)
    _round_weights(model, GGMLQuantizationType[quantization])
    _assert_same_logits(tiny, model, path, kernels)


def test_a_file_in_parts(kernels: KernelSet, tmp_path: Path) -> None:
    tiny = TinyModel("parts", "llama", WIDE)
    model = tiny.build()
    write_gguf(model, tmp_path / "model.gguf", tensors_per_part=8)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert [path.name for path in parts] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    _assert_same_logits(tiny, model, parts[0], kernels)
    with pytest.raises(ModelError, match=r"00002-of-00003.*give the first"):
        open_model(parts[1])
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf: no such file"):
        open_model(parts[0])


def test_rows_may_stay_in_pairs_if_the_rotation_is_told(kernels: KernelSet, tmp_path: Path) -> None:
    tiny = TinyModel("pairs", "llama", WIDE)
    model = tiny.build()
    opened = open_model(write_gguf(model, tmp_path / "model.gguf"))
    layers = tuple(
        replace(layer, rope=replace(layer.rope, interleaved=True)) for layer in opened.config.layers if layer.rope
    )
    in_pairs = replace(
        opened, config=replace(opened.config, layers=layers), names=replace(opened.names, interleaved_rope=False)
    )
    decoder = load_model(in_pairs, kernels, PROMPT_LENGTH, PROMPT_LENGTH)
    actual = Driver(decoder, kernels).run(0, tiny.prompt)
    np.testing.assert_allclose(actual, reference_logits(model, tiny.prompt), rtol=0, atol=TOLERANCE)


def _round_weights(model: PreTrainedModel, kind: GGMLQuantizationType) -> None:
    """What the model's matrices are after a trip through a quantised type."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_router = name.endswith("gate.weight")
            if parameter.dim() >= 2 and not is_router:
                parameter.copy_(torch.from_numpy(dequantize(quantize(parameter.numpy(), kind), kind)))


def _assert_same_logits(tiny: TinyModel, model: PreTrainedModel, path: Path, kernels: KernelSet) -> None:
    decoder = load_model(
        open_model(path), kernels, max_model_len=tiny.prompt_length, max_num_batched_tokens=PROMPT_LENGTH
    )
    actual = Driver(decoder, kernels).run(0, tiny.prompt, chunk=25)
    np.testing.assert_allclose(actual, reference_logits(model, tiny.prompt), rtol=0, atol=TOLERANCE)
