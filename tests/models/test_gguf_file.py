"""The GGUF reader: what it reads equals what was written, and no damaged file gets past it."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from engine.errors import ModelError
from engine.models.gguf_file import GGUFFile

_WEIGHT = np.arange(4 * 64, dtype=np.float32).reshape(4, 64)


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.uint", 7)
    writer.add_int32("a.int", -7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "naïve 你好")
    writer.add_array("a.strings", ["x", "", "naïve", "你好"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.floats", [0.5, -1.0])
    writer.add_tensor("plain", _WEIGHT)
    writer.add_tensor("half", _WEIGHT.astype(np.float16))
    quantised = gguf.quants.quantize(_WEIGHT, GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", quantised, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_scalars_keep_their_kinds(small_file: Path) -> None:
    file = GGUFFile.open(small_file)
    assert file.require("a.uint", int) == 7
    assert file.require("a.int", int) == -7
    assert file.require("a.float", float) == 0.5
    assert file.require("a.uint", float) == 7.0
    assert file.require("a.bool", bool) is True
    assert file.require("a.string", str) == "naïve 你好"
    assert file.get("a.missing", int, 3) == 3


def test_arrays(small_file: Path) -> None:
    file = GGUFFile.open(small_file)
    assert file.strings("a.strings") == ["x", "", "naïve", "你好"]
    assert file.numbers("a.numbers").tolist() == [1, 2, 3]
    assert file.numbers("a.floats").tolist() == [0.5, -1.0]


def test_metadata_is_in_file_order(small_file: Path) -> None:
    keys = [key for key in GGUFFile.open(small_file).metadata if key.startswith("a.")]
    assert keys == ["a.uint", "a.int", "a.float", "a.bool", "a.string", "a.strings", "a.numbers", "a.floats"]


def test_tensors_have_numpy_shapes_and_equal_data(small_file: Path) -> None:
    tensors = GGUFFile.open(small_file).tensors
    assert list(tensors) == ["plain", "half", "packed"]
    assert tensors["plain"].shape == tensors["packed"].shape == (4, 64)
    np.testing.assert_array_equal(tensors["plain"].data(), _WEIGHT)
    np.testing.assert_array_equal(tensors["half"].data(), _WEIGHT.astype(np.float16))
    packed = tensors["packed"]
    assert packed.data().shape == (4, 2 * 34)
    values = gguf.quants.dequantize(packed.data(), packed.ggml_type)
    np.testing.assert_allclose(values, _WEIGHT, atol=1.0)


def test_data_is_read_only_and_outlives_the_file_object(small_file: Path) -> None:
    data = GGUFFile.open(small_file).tensors["plain"].data()
    assert not data.flags.writeable
    np.testing.assert_array_equal(data, _WEIGHT)


def test_equals_the_gguf_packages_reader_on_the_default_model(default_model_path: Path) -> None:
    ours, theirs = GGUFFile.open(default_model_path), gguf.GGUFReader(default_model_path)
    values = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.metadata) == list(values)
    for key, value in values.items():
        read = ours.metadata[key]
        assert (list(read) if isinstance(read, np.ndarray) else read) == value, key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.tensors[tensor.name].data(), tensor.data)


def test_a_value_of_the_wrong_kind_is_an_error_that_names_the_key(small_file: Path) -> None:
    file = GGUFFile.open(small_file)
    with pytest.raises(ModelError, match=r"small\.gguf: a\.string should be of type int, not str"):
        file.require("a.string", int)
    with pytest.raises(ModelError, match=r"a\.bool should be of type int, not bool"):
        file.require("a.bool", int)
    with pytest.raises(ModelError, match=r"the metadata key a\.missing is missing"):
        file.strings("a.missing")
    with pytest.raises(ModelError, match=r"a\.uint should be an array of strings"):
        file.strings("a.uint")
    with pytest.raises(ModelError, match=r"a\.strings should be an array of numbers"):
        file.numbers("a.strings")


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (b"GGUF" + (99).to_bytes(4, "little") + bytes(16), "GGUF version 99 cannot be read"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "a big-endian GGUF file cannot be read"),
        (b"GGUF" + (3).to_bytes(4, "little") + (2**60).to_bytes(8, "little") + bytes(8), "1152921504606846976 tensors"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (2**60).to_bytes(8, "little"), "ends within its header"),
    ],
)
def test_files_that_are_no_gguf_are_named_with_the_reason(tmp_path: Path, contents: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(contents)
    with pytest.raises(ModelError, match=reason) as error:
        GGUFFile.open(path)
    assert str(path) in str(error.value)


def test_a_missing_file_and_a_folder_are_model_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="directory"):
        GGUFFile.open(tmp_path)


def test_truncations_are_found_when_the_file_is_opened(small_file: Path, tmp_path: Path) -> None:
    whole = small_file.read_bytes()
    end = max(tensor.offset_bytes + tensor.size_bytes for tensor in GGUFFile.open(small_file).tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 900, 3), *range(900, end, 41)]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf: "):
            GGUFFile.open(cut)


def test_a_truncated_tensor_is_named(small_file: Path, tmp_path: Path) -> None:
    packed = GGUFFile.open(small_file).tensors["packed"]
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small_file.read_bytes()[: packed.offset_bytes + packed.size_bytes - 5])
    with pytest.raises(ModelError, match="tensor packed reaches 5 bytes past the end of the file"):
        GGUFFile.open(cut)


def test_damaged_bytes_never_raise_anything_but_a_model_error(small_file: Path, tmp_path: Path) -> None:
    whole, source, path = small_file.read_bytes(), random.Random(1), tmp_path / "damaged.gguf"
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            damaged[source.randrange(700)] = source.randrange(256)
        path.write_bytes(damaged)
        try:
            file = GGUFFile.open(path)
            for key in file.metadata:
                file.metadata[key]
            for tensor in file.tensors.values():
                tensor.data()
        except ModelError:
            continue
