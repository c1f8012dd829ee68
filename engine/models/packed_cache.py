"""Packed models on disk: what a start makes of a model's files, for the starts after it.

    <cache>/<name>-<key>/manifest.json      where the model came from, and the sizes and checksums of …
                        /model.gguf         … its outline: configuration, tokenizer and chat template of a GGUF file, or
                        /model/             … the small files of a folder in Hugging Face layout
                        /weights-<form>.bin  packed weights, one file per form that has been asked for

The key is made of the model's path and of name, size and time of change of each of its files: what has changed has
another key. None of these files is opened to find an entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from engine.models.gguf_file import GGUFFile, outline
from engine.models.source import TensorSource

_MANIFEST: Final = "manifest.json"
_FORMAT: Final = 1
_SMALL_FILES: Final = ("*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja")
_WEIGHT_FILES: Final = ("*.safetensors",)
_PART_NAME: Final = re.compile(r"(.+-)\d{5}(-of-\d{5}\.gguf)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What is told about a model's files when they are not open."""

    total_bytes: int
    num_elements: int
    formats: Mapping[str, int]  # bytes by format

    @classmethod
    def of(cls, source: TensorSource) -> SourceFacts:
        return cls(source.total_bytes, source.num_elements, dict(source.formats()))


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """One model in the cache. `model` is opened in place of its source, whose weights are not there."""

    folder: Path
    model: Path
    source: Path
    facts: SourceFacts

    def weights_path(self, form: str) -> Path:
        return self.folder / f"weights-{form}.bin"

    def weights(self) -> list[Path]:
        """The files of packed weights."""
        return sorted(self.folder.glob("weights-*.bin"))

    @contextlib.contextmanager
    def writing(self, form: str) -> Iterator[BinaryIO]:
        """A new file of weights, which takes its place when the block ends without an exception."""
        descriptor, name = tempfile.mkstemp(prefix=".new-", dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
            os.replace(name, self.weights_path(form))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


class PackedCache:
    """The cache's folder. A cache that cannot be read or written is as good as none: methods log a line and go on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, source: Path) -> PackedEntry | None:
        """What is there of the model as its files are now; None if nothing is, or if it is damaged."""
        try:
            return _read_entry(self._entry_folder(source))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("the packed model of %s is of no use (%s): packing again", source, error)
            return None

    def add(self, source: Path, tensors: TensorSource) -> PackedEntry | None:
        """An entry for a model, without weights yet; in the place of those of former versions of it. None for a GGUF in
        parts: its first part, which is what an entry could keep of it, does not name the tensors of the others."""
        if _PART_NAME.fullmatch(source.name):
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.prune(source)
            folder = self._entry_folder(source)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                return _read_entry(folder)  # somebody else was faster
            scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=self._folder))
            try:
                _write_entry(scratch, source, SourceFacts.of(tensors))
                if folder.exists():
                    shutil.rmtree(folder)
                os.rename(scratch, folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            return _read_entry(folder)
        except OSError as error:
            _log.warning("the packed model cannot be kept in %s: %s", self._folder, error.strerror or error)
            return None

    def entries(self) -> list[PackedEntry]:
        """All that can be read."""
        found = []
        for manifest in sorted(self._folder.glob(f"[!.]*/{_MANIFEST}")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found.append(_read_entry(manifest.parent))
        return found

    def prune(self, source: Path | None = None) -> int:
        """Remove entries whose model has changed or is no longer there; of `source` all but the one that fits it now.
        Returns the number of bytes."""
        freed = 0
        for entry in self.entries():
            if source is not None and entry.source != source.resolve() and entry.source.exists():
                continue
            if not entry.source.exists() or entry.folder != self._entry_folder(entry.source):
                freed += self.remove(entry)
        return freed

    def remove(self, entry: PackedEntry) -> int:
        """Processes that have it mapped go on with it. Returns the number of bytes."""
        size = folder_bytes(entry.folder)
        shutil.rmtree(entry.folder, ignore_errors=True)
        return size

    def _entry_folder(self, source: Path) -> Path:
        path = source.resolve()
        state = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in _files(source)]
        key = hashlib.sha256(json.dumps([_FORMAT, str(path), state]).encode()).hexdigest()[:16]
        return self._folder / f"{source.stem if source.suffix == '.gguf' else path.name}-{key}"


def folder_bytes(folder: Path) -> int:
    """What the files in a folder take."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _files(source: Path) -> list[tuple[str, os.stat_result]]:
    """The files that make up a model, without opening one."""
    if source.is_dir():
        paths = {path for pattern in (*_SMALL_FILES, *_WEIGHT_FILES) for path in source.glob(pattern)}
    else:
        paths = {source}
    return [(path.name, path.stat()) for path in sorted(paths)]


def _write_entry(folder: Path, source: Path, facts: SourceFacts) -> None:
    if source.is_dir():
        for pattern in _SMALL_FILES:
            for path in source.glob(pattern):
                target = folder / "model" / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    else:
        keeps = outline(GGUFFile.open(source), lambda tensor: tensor.name.startswith("rope_"))
        (folder / "model.gguf").write_bytes(keeps)
    files = {str(path.relative_to(folder)): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest = {"format": _FORMAT, "source": str(source.resolve()), "facts": asdict(facts), "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def _read_entry(folder: Path) -> PackedEntry:
    """Raises ValueError, KeyError, TypeError or OSError on what is damaged."""
    manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
    if manifest["format"] != _FORMAT:
        raise ValueError(f"its format is {manifest['format']}")
    for name, digest in manifest["files"].items():
        if not (folder / name).exists() or _digest(folder / name) != digest:
            raise ValueError(f"{name} is damaged")
    single = folder / "model.gguf"
    return PackedEntry(
        folder,
        single if single.exists() else folder / "model",
        Path(manifest["source"]),
        SourceFacts(**manifest["facts"]),
    )


def _digest(path: Path) -> list[int]:
    data = path.read_bytes()
    return [len(data), zlib.crc32(data)]
