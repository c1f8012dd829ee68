"""Files that cannot be served end in a ModelError that names file, tensor and reason."""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import ModelError
from engine.models.loader import check_weights, load_model, open_model
from kernels.interface import KernelSet
from tests.models.tiny import EVEN, TinyModel, save
from tests.models.to_gguf import write_gguf

TINY = TinyModel("broken", "llama", EVEN)
WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(TINY.build(), tmp_path)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    folder = save(TINY.build(), tmp_path, shard_bytes=60_000)
    paths = sorted(folder.glob("model-*.safetensors"))
    assert len(paths) > 2
    return paths


def _refused(path: Path, *parts: str) -> None:
    """Opening and checking names all the parts."""
    with pytest.raises(ModelError) as caught:
        check_weights(open_model(path))
    for part in parts:
        assert part in str(caught.value)


def _change_tensors(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps(config))


def test_a_missing_tensor(folder: Path) -> None:
    _change_tensors(folder / WEIGHTS, lambda tensors: tensors.pop(Q_PROJ))
    _refused(folder, str(folder), Q_PROJ, "is missing")


def test_a_left_over_tensor(folder: Path) -> None:
    extra = np.zeros(3, np.float32)
    _change_tensors(folder / WEIGHTS, lambda tensors: tensors.update({"model.layers.0.surprise": extra}))
    _refused(folder, WEIGHTS, "model.layers.0.surprise", "left over")


def test_a_wrong_shape(folder: Path) -> None:
    narrow = np.zeros((48, 40), np.float32)
    _change_tensors(folder / WEIGHTS, lambda tensors: tensors.update({Q_PROJ: narrow}))
    _refused(folder, WEIGHTS, Q_PROJ, "[48, 40], expected [48, 48]")


def test_a_tensor_of_integers(folder: Path) -> None:
    whole = np.zeros((48, 48), np.int32)
    _change_tensors(folder / WEIGHTS, lambda tensors: tensors.update({Q_PROJ: whole}))
    _refused(folder, WEIGHTS, Q_PROJ, "I32")


def test_loading_fails_as_checking_does(folder: Path, kernels: KernelSet) -> None:
    _change_tensors(folder / WEIGHTS, lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(ModelError, match=re.escape(f"tensor {Q_PROJ} is missing")):
        load_model(open_model(folder), kernels, max_model_len=8, max_num_batched_tokens=8)


@pytest.mark.parametrize("size", [0, 7, 100, 20_000])
def test_a_truncated_shard(shards: list[Path], size: int) -> None:
    shards[1].write_bytes(shards[1].read_bytes()[:size])
    _refused(shards[1].parent, str(shards[1]), "truncated, corrupt")


def test_a_shard_whose_header_is_noise(shards: list[Path]) -> None:
    content = bytearray(shards[1].read_bytes())
    content[8:60] = np.random.default_rng(0).bytes(52)
    shards[1].write_bytes(content)
    _refused(shards[1].parent, str(shards[1]), "corrupt")


def test_a_header_that_claims_to_be_huge(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    _refused(folder, WEIGHTS, "corrupt")


def test_a_missing_shard(shards: list[Path]) -> None:
    shards[2].unlink()
    _refused(shards[2].parent, str(shards[2]), "no such file")


def test_a_tensor_that_the_index_puts_elsewhere(shards: list[Path]) -> None:
    index = shards[0].parent / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = shards[0].name
    index.write_text(json.dumps(content))
    _refused(shards[0].parent, str(shards[0]), "model.norm.weight")


@pytest.mark.parametrize("target", ["../elsewhere.safetensors", "/etc/passwd", 3])
def test_an_index_that_points_outside(shards: list[Path], target: object) -> None:
    index = shards[0].parent / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": target}}))
    _refused(shards[0].parent, index.name, "model.norm.weight", "no safetensors file here")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_refused_unread(folder: Path, name: str) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (folder / "exploded").touch, ()

    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    _refused(folder, name, "pickle", "not opened")
    _refused(folder / name, name, "pickle", "not opened")
    assert not (folder / "exploded").exists()


def test_no_weights_at_all(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    _refused(folder, str(folder), "neither model.safetensors nor")


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "fp8"])
def test_weights_quantised_by_another_tool_are_refused_by_name(folder: Path, method: str) -> None:
    _change_config(folder, quantization_config={"quant_method": method, "bits": 4})
    _refused(folder, "config.json", f"quantised with {method}")


def test_a_quantisation_file_beside_the_weights(folder: Path) -> None:
    (folder / "quantize_config.json").write_text("{}")
    _refused(folder, "quantize_config.json", "quantised")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["WhisperForConditionalGeneration"]}, "'WhisperForConditionalGeneration'"),
        ({"architectures": None, "model_type": "whisper"}, "'whisper'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "known are"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "48"}, "'hidden_size' should be of type int, not '48'"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4 KV heads"),
        ({"num_key_value_heads": 0}, "number of KV heads is 0"),
        ({"num_hidden_layers": 0}, "number of layers is 0"),
        ({"num_hidden_layers": 10**9}, "more than any model has"),
        ({"vocab_size": -1}, "vocabulary is -1"),
        ({"intermediate_size": 0}, "size of an MLP is 0"),
        ({"sliding_window": -8}, "window is -8"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0, "factor": 0.0}}, "context is 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -5.0}}, "no finite angles"),
        ({"num_attention_heads": 0, "head_dim": None}, "makes no sense"),
        ({"head_dim": 7}, "not an even number"),
        ({"hidden_act": "mish"}, "'mish' is not known"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "'spiral' is not known"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "'factor' is missing"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "a list of 4 entries"),
        ({"sliding_window": 8, "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "a list of 2 entries"),
    ],
)
def test_a_configuration_that_cannot_be_served(folder: Path, changes: dict[str, Any], reason: str) -> None:
    _change_config(folder, **changes)
    _refused(folder, "config.json", reason)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_config_that_is_no_json_object(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    _refused(folder, "config.json", "JSON")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    _refused(tmp_path / "model.gguf", "model.gguf", "no such file")
    _refused(tmp_path / "model", "no such file or folder")


def test_a_truncated_gguf(tmp_path: Path) -> None:
    path = write_gguf(TINY.build(), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    _refused(path, "model.gguf", "tensor ", "past the end of the file")


def test_a_gguf_of_an_unknown_architecture(tmp_path: Path) -> None:
    path = write_gguf(TINY.build(), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"ulama"))
    _refused(path, "model.gguf", "'ulama'", "general.architecture")


def test_a_gguf_without_a_tensor(tmp_path: Path) -> None:
    path = write_gguf(TINY.build(), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_q.", b"blk.1.attn_z."))
    _refused(path, "model.gguf", "blk.1.attn_q.weight", "is missing")


def test_a_gguf_type_that_nothing_dequantises(tmp_path: Path) -> None:
    path = write_gguf(TINY.build(), tmp_path / "model.gguf")
    content = path.read_bytes()
    entry = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8  # past dimensions and size
    path.write_bytes(content[:entry] + struct.pack("<I", 26) + content[entry + 4 :])  # 26: I32
    _refused(path, "model.gguf", "output_norm.weight", "I32", "cannot be served")
