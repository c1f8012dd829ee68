"""Packed models on disk: found only for what they were made of, given back bit for bit, made again when damaged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.errors import ModelError
from engine.models.decoder import Decoder, Workspace
from engine.models.gguf_file import GGUFFile
from engine.models.loader import check_weights, open_model
from engine.models.packed_cache import PackedCache, PackedEntry, folder_bytes
from engine.models.serving_files import ServingFiles, WeightForm
from kernels.interface import DType, KernelSet
from kernels.reference.torch_kernels import TorchKernels
from server.text.loading import load_tokenizer
from tests.models.cases import FAMILIES, SCALINGS
from tests.models.driver import Driver
from tests.models.tiny import TinyModel, save
from tests.models.to_gguf import write_gguf

native = pytest.importorskip("kernels.native._native", reason="the native kernels are not built")
from kernels.native.native_kernels import NativeKernels  # noqa: E402

CASES = {case.name: case for case in (*FAMILIES, *SCALINGS)}
AS_IT_IS = WeightForm("auto", 128, DType.BFLOAT16)
Logits = npt.NDArray[np.float32]


def kernels_for(form: WeightForm = AS_IT_IS) -> KernelSet:
    return NativeKernels(form.dtype, 2)


def start(
    path: Path, cache: Path | None, tiny: TinyModel, form: WeightForm = AS_IT_IS, kernels: KernelSet | None = None
) -> tuple[Logits, int]:
    """What a start with this cache answers, and how many bytes of its weights are mapped."""
    kernels = kernels or kernels_for(form)
    files = ServingFiles(path, cache_folder=cache)
    loaded = files.load(kernels, form, 2, lambda done, total: None)
    decoder = Decoder(files.config, loaded.weights, kernels, Workspace(files.config, kernels, 64), 64)
    return Driver(decoder, kernels).run(0, tiny.prompt[:40]), loaded.mapped_bytes


@pytest.fixture
def tiny() -> TinyModel:
    return CASES["llama-biases"]


@pytest.fixture
def folder(tiny: TinyModel, tmp_path: Path) -> Path:
    return save(tiny.build(), tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-moe", "gemma3", "gpt2", "phi3-window", "llama-odd"])
@pytest.mark.parametrize(
    "form",
    [AS_IT_IS, WeightForm("auto", 128, DType.FLOAT32), WeightForm("int4", 32, DType.BFLOAT16)],
    ids=lambda form: f"{form.quantization}-{form.dtype}",
)
def test_a_later_start_maps_what_the_first_one_packed_and_answers_the_same_bits(
    name: str, form: WeightForm, tmp_path: Path, cache: Path
) -> None:
    tiny = CASES[name]
    path = save(tiny.build(), tmp_path / "model")
    plain, _ = start(path, None, tiny, form)
    first, mapped_first = start(path, cache, tiny, form)
    second, mapped_second = start(path, cache, tiny, form)
    assert mapped_first == 0
    [entry] = PackedCache(cache).entries()
    [weights] = entry.weights()
    assert mapped_second == weights.stat().st_size
    np.testing.assert_array_equal(first, plain)
    np.testing.assert_array_equal(second, plain)


def test_a_later_start_reads_nothing_of_the_model(tmp_path: Path, cache: Path) -> None:
    """The file is overwritten with zeros, size and time of change as before. Its rotations come from tensors."""
    tiny = CASES["longrope"]
    path = write_gguf(tiny.build(), tmp_path / "model.gguf", "F16")
    first, _ = start(path, cache, tiny)
    before = path.stat()
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second, mapped = start(path, cache, tiny)
    assert mapped > 0
    np.testing.assert_array_equal(second, first)


def test_a_gguf_in_parts_is_packed_at_each_start(tmp_path: Path, cache: Path) -> None:
    tiny = CASES["llama"]
    write_gguf(tiny.build(), tmp_path / "model.gguf", "F16", tensors_per_part=4)
    path = min(tmp_path.glob("model-*.gguf"))
    first, _ = start(path, cache, tiny)
    second, mapped = start(path, cache, tiny)
    assert mapped == 0
    assert PackedCache(cache).entries() == []
    np.testing.assert_array_equal(second, first)


def test_each_form_has_a_file_of_its_own(folder: Path, cache: Path, tiny: TinyModel) -> None:
    forms = [AS_IT_IS, WeightForm("int8", 128, DType.BFLOAT16), WeightForm("auto", 128, DType.FLOAT32)]
    answers = [start(folder, cache, tiny, form)[0] for form in forms]
    again = [start(folder, cache, tiny, form) for form in forms]
    [entry] = PackedCache(cache).entries()
    assert len(entry.weights()) == 3
    for (answer, mapped), expected in zip(again, answers, strict=True):
        assert mapped > 0
        np.testing.assert_array_equal(answer, expected)


def test_every_instruction_set_maps_the_same_file(folder: Path, cache: Path, tiny: TinyModel) -> None:
    start(folder, cache, tiny)
    for isa in native.available_isas().split(", "):
        kernels = NativeKernels(DType.BFLOAT16, 1, isa)
        expected, _ = start(folder, None, tiny, kernels=NativeKernels(DType.BFLOAT16, 1, isa))
        answer, mapped = start(folder, cache, tiny, kernels=kernels)
        assert mapped > 0
        np.testing.assert_array_equal(answer, expected)


def test_kernels_that_pack_nothing_read_the_files(folder: Path, cache: Path, tiny: TinyModel) -> None:
    start(folder, cache, tiny)
    assert start(folder, cache, tiny, kernels=TorchKernels("cpu", DType.FLOAT32, 1))[1] == 0


# -- what has changed -----------------------------------------------------------------------------------------------


def touch(path: Path) -> None:
    os.utime(path, (1, 1))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


@pytest.mark.parametrize("change", [touch, grow])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_model_that_has_changed_is_not_found_and_packing_it_removes_the_old_one(
    folder: Path, cache: Path, tiny: TinyModel, change: Callable[[Path], None], name: str
) -> None:
    start(folder, cache, tiny)
    if (name, change) == ("model.safetensors", grow):
        save(TinyModel("another", "llama", tiny.options | {"intermediate_size": 60}).build(), folder)
    else:
        change(folder / name)
    assert PackedCache(cache).find(folder) is None
    assert start(folder, cache, tiny)[1] == 0
    assert len(PackedCache(cache).entries()) == 1
    assert start(folder, cache, tiny)[1] > 0


def test_a_model_that_is_gone_is_pruned_and_others_stay(folder: Path, cache: Path, tmp_path: Path) -> None:
    tiny = CASES["llama"]
    path = write_gguf(tiny.build(), tmp_path / "other.gguf", "F16")
    start(path, cache, tiny)
    start(folder, cache, CASES["llama-biases"])
    path.unlink()
    [gone] = [entry for entry in PackedCache(cache).entries() if entry.source == path]
    size = folder_bytes(gone.folder)
    assert PackedCache(cache).prune() == size > 0
    [left] = PackedCache(cache).entries()
    assert left.source == folder


# -- what is damaged ------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_the_end(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(offset: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 4
        path.write_bytes(data)

    return flip


def one_line(caplog: pytest.LogCaptureFixture) -> str:
    [record] = caplog.records
    assert "\n" not in record.getMessage()
    return record.getMessage()


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        cut_the_end,
        empty,
        flip_a_bit(0),
        flip_a_bit(4096 + 17),
        flip_a_bit(-1),
        flip_a_bit(-30),
        flip_a_bit(-20),
    ],
)
def test_damaged_weights_are_told_in_a_line_and_packed_again(
    folder: Path, cache: Path, tiny: TinyModel, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = start(folder, cache, tiny)
    [path] = PackedCache(cache).entries()[0].weights()
    damage(path)
    with caplog.at_level(logging.WARNING):
        second, mapped = start(folder, cache, tiny)
    assert mapped == 0
    assert "packing again" in one_line(caplog)
    np.testing.assert_array_equal(second, first)
    third, mapped = start(folder, cache, tiny)
    assert mapped > 0
    np.testing.assert_array_equal(third, first)


@pytest.mark.parametrize("name", ["manifest.json", "model/config.json"])
def test_a_damaged_entry_is_told_in_a_line_and_made_again(
    folder: Path, cache: Path, tiny: TinyModel, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = start(folder, cache, tiny)
    [entry] = PackedCache(cache).entries()
    truncate(entry.folder / name)
    with caplog.at_level(logging.WARNING):
        second, mapped = start(folder, cache, tiny)
    assert mapped == 0
    assert "packing again" in one_line(caplog)
    np.testing.assert_array_equal(second, first)
    assert start(folder, cache, tiny)[1] > 0


def test_weights_of_another_model_are_refused(
    folder: Path, cache: Path, tiny: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("gemma3", "qwen2-moe", "llama"):
        start(save(CASES[name].build(), tmp_path / name), cache, CASES[name])
    first, _ = start(folder, cache, tiny)
    mine = PackedCache(cache).find(folder)
    assert mine is not None
    for name in ("gemma3", "qwen2-moe", "llama"):
        other = PackedCache(cache).find(tmp_path / name)
        assert other is not None
        mine.weights()[0].write_bytes(other.weights()[0].read_bytes())
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            second, mapped = start(folder, cache, tiny)
        assert mapped == 0
        assert "weights" in one_line(caplog)
        np.testing.assert_array_equal(second, first)


def test_weights_that_were_packed_for_another_layout_are_packed_again(
    folder: Path, cache: Path, tiny: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = start(folder, cache, tiny)
    later = kernels_for()
    [entry] = PackedCache(cache).entries()
    later.packed_format = "native99-own-bits"
    os.rename(entry.weights()[0], entry.weights_path(AS_IT_IS.file_name(later.packed_format)))
    with caplog.at_level(logging.WARNING):
        second, mapped = start(folder, cache, tiny, kernels=later)
    assert mapped == 0
    assert "it was packed for native" in one_line(caplog)
    np.testing.assert_array_equal(second, first)


def test_a_cache_that_cannot_be_written_costs_a_line_and_nothing_else(
    folder: Path, tiny: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        answer, mapped = start(folder, blocked / "cache", tiny)
    assert mapped == 0
    assert "cannot be kept" in one_line(caplog)
    np.testing.assert_array_equal(answer, start(folder, None, tiny)[0])


def test_a_disk_that_fills_up_leaves_no_half_written_file(
    folder: Path, cache: Path, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("engine.models.packed_file.RecordingPacker.finish", full)
        with caplog.at_level(logging.WARNING):
            answer, _ = start(folder, cache, tiny)
    assert "No space left on device" in one_line(caplog)
    [entry] = PackedCache(cache).entries()
    assert entry.weights() == []
    assert not list(entry.folder.glob(".new-*"))
    assert start(folder, cache, tiny)[1] == 0
    np.testing.assert_array_equal(start(folder, cache, tiny)[0], answer)


# -- the small files ------------------------------------------------------------------------------------------------


def entry_of(path: Path, cache: Path) -> PackedEntry:
    source = open_model(path).source
    assert source is not None
    entry = PackedCache(cache).add(path, source)
    assert entry is not None
    return entry


def test_tokenizer_and_template_of_a_gguf_come_out_of_its_outline(default_model_path: Path, cache: Path) -> None:
    entry = entry_of(default_model_path, cache)
    assert entry.model.stat().st_size < 3_000_000
    ours, theirs = load_tokenizer(entry.model), load_tokenizer(default_model_path)
    text = "An octavo is a book.\n\n<|im_start|>user äöü 漢字"
    assert ours.tokenizer.encode(text, True) == theirs.tokenizer.encode(text, True)
    assert ours.special_texts == theirs.special_texts
    messages = [{"role": "user", "content": "Hello!"}]
    assert ours.chat_template is not None
    assert theirs.chat_template is not None
    assert ours.chat_template.render(messages) == theirs.chat_template.render(messages)
    assert open_model(entry.model, "dummy").config == open_model(default_model_path).config


def test_an_outline_is_no_model_to_serve(default_model_path: Path, cache: Path) -> None:
    entry = entry_of(default_model_path, cache)
    assert GGUFFile.open(entry.model).is_outline
    with pytest.raises(ModelError, match="without the data of tensor"):
        check_weights(open_model(entry.model))


def test_the_small_files_of_a_folder_are_kept(folder: Path, cache: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    entry = entry_of(folder, cache)
    kept = {str(path.relative_to(entry.model)) for path in entry.model.rglob("*") if path.is_file()}
    assert {"config.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"} <= kept
    assert "model.safetensors" not in kept
