"""Weights come out the same however they were saved, streamed and counted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from engine.models.gguf_source import NOT_SERVED
from engine.models.loader import load_model, open_model
from engine.models.safetensors_source import SafetensorsSource
from kernels.interface import KernelSet
from tests.models.driver import Driver
from tests.models.tiny import EVEN, FULL, ODD, TinyModel, reference_logits, save
from tests.models.to_gguf import write_gguf

UNTIED = TinyModel("untied", "llama", EVEN)
TIED = TinyModel("tied", "llama", ODD | {"tie_word_embeddings": True})
TOLERANCE = 1e-4


def _logits(path: Path, tiny: TinyModel, kernels: KernelSet) -> npt.NDArray[np.float32]:
    decoder = load_model(open_model(path), kernels, tiny.prompt_length, tiny.prompt_length)
    return Driver(decoder, kernels).run(0, tiny.prompt)


def _assert_close(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tiny", [UNTIED, TIED], ids=lambda tiny: tiny.name)
def test_shards_give_the_logits_of_a_single_file(tiny: TinyModel, kernels: KernelSet, tmp_path: Path) -> None:
    model = tiny.build()
    single = save(model, tmp_path / "single")
    sharded = save(model, tmp_path / "sharded", shard_bytes=60_000)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    np.testing.assert_array_equal(_logits(sharded, tiny, kernels), _logits(single, tiny, kernels))


def test_a_tied_head_may_be_repeated_in_the_file(kernels: KernelSet, tmp_path: Path) -> None:
    model = TIED.build()
    folder = save(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    _assert_close(_logits(folder, TIED, kernels), reference_logits(model, TIED.prompt))


def test_names_without_the_head_class_prefix(kernels: KernelSet, tmp_path: Path) -> None:
    model = TIED.build()
    folder = save(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    _assert_close(_logits(folder, TIED, kernels), reference_logits(model, TIED.prompt))


def test_the_older_form_of_config_json(kernels: KernelSet, tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    tiny = replace(UNTIED, options=EVEN | {"rope_parameters": {**scaling, "rope_theta": 500.0}})
    model = tiny.build()
    folder = save(model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["head_dim"], config["architectures"]
    del scaling["rope_type"]
    config |= {"rope_theta": 500.0, "rope_scaling": {**scaling, "type": "yarn"}}
    (folder / "config.json").write_text(json.dumps(config))
    _assert_close(_logits(folder, tiny, kernels), reference_logits(model, tiny.prompt))


def test_the_older_form_of_two_rope_bases(kernels: KernelSet, tmp_path: Path) -> None:
    options = FULL | {"head_dim": 8, "sliding_window": 16, "num_hidden_layers": 7}
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    }
    tiny = TinyModel("two-bases", "gemma3_text", options | {"rope_parameters": ropes})
    model = tiny.build()
    folder = save(model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "layer_types", "_sliding_window_pattern", "tie_word_embeddings"):
        del config[key]
    config |= {
        "sliding_window_pattern": 6,
        "rope_theta": 900.0,
        "rope_local_base_freq": 70.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    opened = open_model(folder)
    assert opened.config.context_length == 48  # what the file states: its scaling is counted in
    _assert_close(_logits(folder, tiny, kernels), reference_logits(model, tiny.prompt))


def test_the_text_model_of_a_multimodal_folder(kernels: KernelSet, tmp_path: Path) -> None:
    tiny = TinyModel("multimodal", "gemma3_text", EVEN | {"head_dim": 16, "sliding_window": 16})
    text_model = tiny.build()
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text_model.config.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text_model.model.state_dict())
    folder = save(model, tmp_path)
    assert any("vision_tower" in name for name in SafetensorsSource(folder).names())
    _assert_close(_logits(folder, tiny, kernels), reference_logits(text_model, tiny.prompt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_read_exactly(dtype: torch.dtype, kernels: KernelSet, tmp_path: Path) -> None:
    model = UNTIED.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    expected = reference_logits(model, UNTIED.prompt)
    _assert_close(_logits(save(model.to(dtype), tmp_path), UNTIED, kernels), expected)


def test_progress_ends_with_all_bytes(kernels: KernelSet, tmp_path: Path) -> None:
    opened = open_model(save(UNTIED.build(), tmp_path, shard_bytes=60_000))
    seen: list[tuple[int, int]] = []
    load_model(opened, kernels, 8, 8, progress=lambda done, total: seen.append((done, total)))
    assert opened.source is not None
    total = opened.source.total_bytes
    assert [all_bytes for _, all_bytes in seen] == [total] * len(opened.source.names())
    done = [done_bytes for done_bytes, _ in seen]
    assert done == sorted(done)
    assert done[-1] == total


@pytest.mark.parametrize("load_path", ["folder", "gguf"])
def test_dummy_weights_need_only_the_configuration(load_path: str, kernels: KernelSet, tmp_path: Path) -> None:
    model = UNTIED.build()
    path = save(model, tmp_path) if load_path == "folder" else write_gguf(model, tmp_path / "model.gguf")
    if load_path == "folder":
        (path / "model.safetensors").unlink()

    def logits(seed: int) -> npt.NDArray[np.float32]:
        decoder = load_model(open_model(path, "dummy"), kernels, 64, 64, dummy_seed=seed)
        return Driver(decoder, kernels).run(0, UNTIED.prompt)

    np.testing.assert_array_equal(logits(1), logits(1))
    assert np.isfinite(logits(1)).all()
    assert np.abs(logits(1) - logits(2)).max() > 0.01


def test_every_gguf_type_is_served_or_refused_by_name() -> None:
    for kind in GGMLQuantizationType:
        block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)
        if kind.name in NOT_SERVED:
            with pytest.raises(NotImplementedError):
                dequantize(block, kind)
        else:
            dequantize(block, kind)


_MEASURE = """
import sys
from pathlib import Path
from engine.models.loader import load_model, open_model
from kernels.interface import DType
from kernels.reference.torch_kernels import TorchKernels

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

kernels = TorchKernels(device="cpu", dtype=DType.FLOAT32, num_threads=1)
opened = open_model(Path(sys.argv[1]))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = status("VmRSS")
decoder = load_model(opened, kernels, 8, 8)
print(status("VmHWM") - before, kernels.weight_bytes())
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_the_peak_of_memory_is_the_weights_and_one_shard(tmp_path: Path) -> None:
    megabyte = 1 << 20
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    model = TinyModel("large", "llama", sizes | {"num_key_value_heads": 8, "vocab_size": 2048}).build()
    folder = save(model, tmp_path, shard_bytes=17 * megabyte)
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    finished = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder)], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    peak_bytes, weight_bytes = map(int, finished.stdout.split())
    assert weight_bytes > 6 * largest
    assert peak_bytes < weight_bytes + largest + 8 * megabyte
