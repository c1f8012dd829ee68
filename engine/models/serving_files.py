"""A model's files as a start needs them: packed by a former start where there is such a thing, else as they are."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from engine.models.checkpoint import Progress
from engine.models.config import ModelConfig
from engine.models.loader import LoadFormat, OpenedModel, load_weights, open_model
from engine.models.packed_cache import PackedCache, PackedEntry, SourceFacts
from engine.models.packed_file import PackedFile, PackedFileError, RecordingPacker, ReplayingPacker, ShapesOnly
from engine.models.quantization import Quantization
from engine.models.requantize import label, requantized
from engine.models.weights import DecoderWeights, WeightPacker
from kernels.interface import DType, KernelSet

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The bits that weights are to have."""

    quantization: Quantization
    group: int
    dtype: DType  # the compute type

    def label(self, facts: SourceFacts | None) -> str:
        """For people; `facts` of the files, None for dummy weights."""
        formats = facts.formats if facts is not None else {}
        main = max(formats, key=formats.__getitem__) if formats else "dummy"
        return label(self.quantization, self.group, main, self.dtype.value)

    def file_name(self, packed_format: str) -> str:
        return f"{packed_format}-{label(self.quantization, self.group, 'auto', 'none')}"


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """`mapped_bytes` of them lie in a mapped file: memory that counts as free though it is in use."""

    weights: DecoderWeights
    mapped_bytes: int = 0


class ServingFiles:
    """What the engine is built from. Opening reads headers alone; load() reads or maps the weights."""

    def __init__(self, path: Path, load_format: LoadFormat = "auto", cache_folder: Path | None = None) -> None:
        """Without a cache folder nothing is looked for or kept. Raises ModelError."""
        self._path = path
        self._load_format = load_format
        self._cache = PackedCache(cache_folder) if cache_folder is not None and load_format == "auto" else None
        self._entry = self._cache.find(path) if self._cache is not None and path.exists() else None
        self._opened = open_model(path, load_format) if self._entry is None else open_model(self._entry.model, "dummy")
        self.facts: SourceFacts | None = None  # None: dummy weights
        if self._entry is not None:
            self.facts = self._entry.facts
        elif self._opened.source is not None:
            self.facts = SourceFacts.of(self._opened.source)

    @property
    def config(self) -> ModelConfig:
        return self._opened.config

    def load(self, kernels: KernelSet, form: WeightForm, num_threads: int, progress: Progress) -> LoadedWeights:
        """The weights in the kernels' layout: mapped, if a former start has packed them in this form, else packed now
        and kept for the next start. `progress` gets (bytes done, bytes in all). Raises as load_weights."""
        name = None if kernels.packed_format is None else form.file_name(kernels.packed_format)
        if self._entry is not None and name is not None:
            mapped = _map(self._entry, name, self._opened, kernels, num_threads, progress)
            if mapped is not None:
                return mapped
        opened = self._opened if self._entry is None else open_model(self._path, self._load_format)
        if self._cache is None or name is None or opened.source is None:
            return LoadedWeights(_pack(opened, kernels, form, progress))
        entry = self._entry or self._cache.add(self._path, opened.source)
        if entry is None:
            return LoadedWeights(_pack(opened, kernels, form, progress))
        return LoadedWeights(_pack_and_keep(entry, name, opened, kernels, form, progress))


def _map(
    entry: PackedEntry, name: str, opened: OpenedModel, kernels: KernelSet, num_threads: int, progress: Progress
) -> LoadedWeights | None:
    path = entry.weights_path(name)
    try:
        file = PackedFile(path, kernels.packed_format)
        file.check(num_threads, progress)
        packer = ReplayingPacker(kernels, file)
        weights = WeightPacker(opened.config, ShapesOnly(opened.names), packer).pack()
        packer.finish()
    except FileNotFoundError:
        return None
    except (PackedFileError, OSError) as error:
        _log.warning("the packed weights %s are of no use (%s): packing again", path, error)
        return None
    return LoadedWeights(weights, file.num_bytes)


def _pack(opened: OpenedModel, kernels: KernelSet, form: WeightForm, progress: Progress) -> DecoderWeights:
    return load_weights(
        opened,
        kernels,
        progress,
        convert=lambda weights: requantized(weights, form.quantization, form.group, form.dtype),
    )


def _pack_and_keep(
    entry: PackedEntry, name: str, opened: OpenedModel, kernels: KernelSet, form: WeightForm, progress: Progress
) -> DecoderWeights:
    """A disk that is full or read-only costs the next start its speed, and nothing else."""
    weights = None
    try:
        with entry.writing(name) as file:
            packer = RecordingPacker(kernels, file)
            weights = load_weights(
                opened,
                kernels,
                progress,
                convert=lambda read: requantized(read, form.quantization, form.group, form.dtype),
                packer=packer,
            )
            packer.finish()
    except OSError as error:
        _log.warning("the packed weights cannot be kept in %s: %s", entry.folder, error.strerror or error)
    return weights or _pack(opened, kernels, form, progress)
