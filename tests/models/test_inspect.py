"""What `octavo inspect` says of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.models.config import num_parameters
from engine.models.inspect import inspect_model, render
from engine.models.loader import open_model
from kernels.interface import DType
from tests.models.cases import FAMILIES
from tests.models.tiny import EVEN, WINDOW, TinyModel, save
from tests.models.to_gguf import write_gguf

LLAMA = TinyModel("inspected", "llama", EVEN | {"head_dim": 8})
SLIDING = TinyModel("sliding", "mistral", EVEN | {"sliding_window": WINDOW})
GIGABYTE = 10**9


@pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.name)
def test_parameters_are_those_that_transformers_counts(tiny: TinyModel, tmp_path: Path) -> None:
    model = tiny.build()
    assert num_parameters(open_model(save(model, tmp_path)).config) == model.num_parameters()


def test_a_model_that_fits(tmp_path: Path) -> None:
    model = LLAMA.build()
    report = inspect_model(save(model, tmp_path), GIGABYTE)
    assert report.problem is None
    assert report.kv_bytes_per_token == 2 * 2 * 3 * 8 * 2  # keys and values, layers, KV heads, head_dim, bytes
    assert report.file_bytes == 4 * model.num_parameters()
    assert report.fit is not None
    assert report.fit.weight_bytes == 2 * model.num_parameters()
    assert report.fit.context_bytes == 48 * 192
    assert report.fit.num_contexts == (GIGABYTE - 2 * model.num_parameters()) // (48 * 192)
    text = render(report)
    assert "LlamaForCausalLM (family Llama)" in text
    assert "192 bytes a token in bfloat16" in text
    assert text.endswith("can be served yes")


def test_quantised_weights_count_at_their_own_bits(tmp_path: Path) -> None:
    tiny = TinyModel("quantised", "llama", EVEN | {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16})
    report = inspect_model(write_gguf(tiny.build(), tmp_path / "model.gguf", "Q8_0"), GIGABYTE)
    formats = dict(report.formats)
    assert set(formats) == {"Q8_0", "F32"}
    assert report.fit is not None
    assert report.fit.weight_bytes == formats["Q8_0"] + formats["F32"] // 2


def test_a_sliding_group_stops_growing_at_its_window(tmp_path: Path) -> None:
    report = inspect_model(save(SLIDING.build(), tmp_path), GIGABYTE, DType.FLOAT32)
    assert report.fit is not None
    assert report.fit.context_bytes == WINDOW * report.kv_bytes_per_token
    assert f"2 layers see {WINDOW} tokens back" in render(report)


def test_a_model_that_fits_in_part(tmp_path: Path) -> None:
    model = LLAMA.build()
    report = inspect_model(save(model, tmp_path), 2 * model.num_parameters() + 10 * 192 + 1)
    assert report.fit is not None
    assert (report.fit.num_contexts, report.fit.longest_context) == (0, 10)
    assert "in part: 10 of 48 tokens" in render(report)


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    report = inspect_model(save(LLAMA.build(), tmp_path), 1000)
    assert report.fit is not None
    assert report.fit.longest_context == 0
    assert "fits here     no: " in render(report)


def test_broken_weights_are_the_reason_beside_the_facts(tmp_path: Path) -> None:
    model = LLAMA.build()
    folder = save(model, tmp_path)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    report = inspect_model(folder, GIGABYTE)
    assert report.config is not None
    assert report.problem is not None
    assert "tensors left over" in report.problem
    assert "can be served no: " in render(report)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    report = inspect_model(tmp_path, GIGABYTE)
    assert report.config is None
    assert render(report).startswith(f"{tmp_path}\n  can be served no: {tmp_path / 'config.json'}: ")
