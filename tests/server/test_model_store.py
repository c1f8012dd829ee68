"""From --model to files: what is taken as it is, what is fetched, what is refused."""

from __future__ import annotations

import hashlib
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from server import model_store
from server.model_store import ModelNotFound, resolve_model
from server.packaged_models import PACKAGED_MODELS, PackagedModel, Wheel, listing
from server.settings import DEFAULT_MODEL

CONTENT = b"GGUF, or so it says\n" * 100
LICENCE = b"Do as you like.\n"


def build_wheel(index: Path, name: str, files: dict[str, bytes], members: dict[str, str]) -> Wheel:
    path = index / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(f"{name}==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size, members)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model in three wheels, one with its licence, in a folder that pip takes for its whole index."""
    index = tmp_path / "index"
    index.mkdir()
    licence = build_wheel(index, "toy-model", {"toy/LICENCE": LICENCE, "toy/x.py": b""}, {"toy/LICENCE": "LICENCE"})
    first = build_wheel(index, "toy-model-part1", {"toy1/a": CONTENT[:709]}, {"toy1/a": "toy.gguf"})
    second = build_wheel(index, "toy-model-part2", {"toy2/b": CONTENT[709:]}, {"toy2/b": "toy.gguf"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    package = PackagedModel(
        name="toy",
        about="",
        licence="Toy Licence",
        file="toy.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
        wheels=(licence, first, second),
    )
    monkeypatch.setattr(model_store, "PACKAGED_MODELS", (package,))
    return package


def test_a_packaged_model_is_fetched_and_joined_once(
    package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files = resolve_model("toy", tmp_path / "cache")
    assert files.name == "toy"
    assert files.path == tmp_path / "cache" / "models" / "toy" / "toy.gguf"
    assert files.path.read_bytes() == CONTENT
    assert (files.path.parent / "LICENCE").read_bytes() == LICENCE
    assert sorted(path.name for path in files.path.parent.iterdir()) == ["LICENCE", "toy.gguf"]
    said = capfd.readouterr()
    assert "licence: Toy Licence" in said.err
    assert said.out == ""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert resolve_model("toy", tmp_path / "cache") == files
    assert capfd.readouterr().err == ""


def test_a_truncated_file_in_the_cache_is_fetched_again(package: PackagedModel, tmp_path: Path) -> None:
    path = resolve_model("toy", tmp_path).path
    path.write_bytes(CONTENT[:10])
    assert resolve_model("toy", tmp_path).path.read_bytes() == CONTENT


@pytest.mark.parametrize("what", ["the second wheel", "the joined file"])
def test_a_file_that_is_not_the_expected_one_is_refused(
    package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    wheels = list(package.wheels)
    if what == "the second wheel":
        wheels[1] = replace(wheels[1], sha256="0" * 64)
        package = replace(package, wheels=tuple(wheels))
    else:
        package = replace(package, wheels=(wheels[0], wheels[2], wheels[1]))
    monkeypatch.setattr(model_store, "PACKAGED_MODELS", (package,))
    with pytest.raises(ModelNotFound, match="SHA-256"):
        resolve_model("toy", tmp_path / "cache")
    assert list((tmp_path / "cache" / "models" / "toy").iterdir()) == []


def test_the_default_model_is_among_those_that_are_listed() -> None:
    names = [package.name for package in PACKAGED_MODELS]
    assert names[0] == DEFAULT_MODEL
    assert all(name in listing() for name in names)
    for package in PACKAGED_MODELS:
        assert package.licence in listing()
        assert package.file in {name for wheel in package.wheels for name in wheel.members.values()}


def test_no_network_is_said_with_what_to_check(
    package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing-here"))
    with pytest.raises(ModelNotFound, match=r"could not download toy with pip(.|\n)*--model"):
        resolve_model("toy", tmp_path)


def test_a_full_disk_is_said_before_anything_is_fetched(
    package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(100, 99, 1))
    with pytest.raises(ModelNotFound, match=r"MiB free and the download needs(.|\n)*--cache-dir"):
        resolve_model("toy", tmp_path)


def test_a_cache_that_cannot_be_written_is_said(package: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFound, match=r"cannot keep the model in .*--cache-dir"):
        resolve_model("toy", tmp_path / "file")


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
        ("llama", "a folder in Hugging Face layout, a .gguf file, a Hub id.*gemma-3-270m"),
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


@pytest.mark.parametrize("with_weights", [True, False])
def test_weights_come_from_the_hub_only_when_they_are_wanted(
    with_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    patterns: list[str] = []

    def snapshot(model: str, cache_dir: Path, allow_patterns: list[str]) -> str:
        patterns.extend(allow_patterns)
        return str(cache_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name", tmp_path, with_weights).path == tmp_path / "hub"
    assert ("*.safetensors" in patterns) is with_weights
    assert "*.json" in patterns
