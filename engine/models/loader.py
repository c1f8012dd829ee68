"""From a folder in Hugging Face layout, or a GGUF file, to a Decoder.

files = open_model(path)                     # cheap: configuration and headers
decoder = load_model(files, kernels, …)      # reads the weights
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from engine.errors import ModelError
from engine.models.architecture import WeightNames
from engine.models.checkpoint import Checkpoint, DummyWeights, Progress, Weights
from engine.models.config import ModelConfig
from engine.models.config_check import first_problem
from engine.models.decoder import Decoder, Workspace
from engine.models.gguf_file import GGUFFile
from engine.models.gguf_source import GGUFSource
from engine.models.hf_config import HFConfig
from engine.models.registry import find_gguf, find_hf
from engine.models.safetensors_source import PICKLE_SUFFIXES, SafetensorsSource, pickle_refused
from engine.models.source import TensorSource
from engine.models.weights import DecoderWeights, Packer, WeightPacker
from kernels.interface import Array, HostWeight, KernelSet

CONFIG_FILE: Final = "config.json"
LoadFormat = Literal["auto", "dummy"]  # dummy: random weights of the right shapes
_Fields = TypeVar("_Fields", HFConfig, GGUFFile)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model on disk whose configuration is understood; its weights are not yet read."""

    path: Path
    family: str
    config: ModelConfig
    names: WeightNames
    source: TensorSource | None  # None: dummy weights


def open_model(path: Path, load_format: LoadFormat = "auto") -> OpenedModel:
    """Read the configuration and the headers of the weights.

    `path` is a folder with config.json, or a .gguf file. With `dummy` no weights need be there. Raises ModelError
    naming the file and the reason.
    """
    if path.is_dir():
        return _open_folder(path, load_format)
    if path.suffix == ".gguf":
        return _open_gguf(path, load_format)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    if path.suffix in PICKLE_SUFFIXES:
        raise pickle_refused(path)
    raise ModelError(f"{path}: neither a folder in Hugging Face layout nor a .gguf file; it was not opened")


def load_model(
    files: OpenedModel,
    kernels: KernelSet,
    max_model_len: int,
    max_num_batched_tokens: int,
    progress: Progress | None = None,
    dummy_seed: int = 0,
) -> Decoder:
    """load_weights, and a decoder of them for steps of so many tokens and contexts of that length."""
    weights = load_weights(files, kernels, progress, dummy_seed)
    workspace = Workspace(files.config, kernels, max_num_batched_tokens)
    return Decoder(files.config, weights, kernels, workspace, max_model_len)


def load_weights(
    files: OpenedModel,
    kernels: KernelSet,
    progress: Progress | None = None,
    dummy_seed: int = 0,
    convert: Callable[[Weights], Weights] | None = None,
    packer: Packer | None = None,
) -> DecoderWeights:
    """Read the weights, tensor by tensor, into the kernels' layout. `progress` gets (bytes done, bytes in all);
    `convert` stands between the files and the packer, `packer` in the place of the kernels.

    Raises ModelError naming file, tensor and reason; ValueError from kernels that cannot take a weight's type.
    """
    weights: Weights
    if files.source is None:
        weights = DummyWeights(dummy_seed)
    else:
        weights = Checkpoint(files.source, files.names, files.config.tied_head, progress)
    return WeightPacker(files.config, convert(weights) if convert else weights, packer or kernels).pack()


def check_weights(files: OpenedModel) -> None:
    """Ask for every weight as loading would, and keep none. Raises ModelError as load_model does."""
    if files.source is not None:
        weights = Checkpoint(files.source, files.names, files.config.tied_head, progress=None)
        WeightPacker(files.config, weights, _Discard()).pack()


class _Discard:
    """Packs into nothing."""

    def pack_linear(self, parts: Sequence[HostWeight], bias: npt.NDArray[np.float32] | None = None) -> Array:
        return None

    def pack_experts(self, experts: Sequence[Sequence[HostWeight]]) -> Array:
        return None

    def pack_vector(self, host: npt.NDArray[np.float32]) -> Array:
        return None


def _open_folder(folder: Path, load_format: LoadFormat) -> OpenedModel:
    hf = HFConfig.open(folder / CONFIG_FILE)
    _refuse_quantised(folder, hf)
    family = find_hf(hf)
    if family.config_from_hf is None or family.hf_names is None:
        raise ModelError(f"{folder}: {family.name} is known from GGUF files only")
    config = _configure(family.config_from_hf, hf, hf.path)
    source = SafetensorsSource(folder) if load_format == "auto" else None
    return OpenedModel(folder, family.name, config, family.hf_names, source)


def _open_gguf(path: Path, load_format: LoadFormat) -> OpenedModel:
    gguf, source = GGUFSource.open(path)
    family = find_gguf(gguf)
    if family.config_from_gguf is None or family.gguf_names is None:
        raise ModelError(f"{path}: {family.name} is known from folders in Hugging Face layout only")
    config = _configure(family.config_from_gguf, gguf, path)
    return OpenedModel(path, family.name, config, family.gguf_names, source if load_format == "auto" else None)


def _configure(mapping: Callable[[_Fields], ModelConfig], fields: _Fields, path: Path) -> ModelConfig:
    """The family's reading of a file, checked. Nonsense in the file can trip a mapping up anywhere."""
    try:
        config = mapping(fields)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: the configuration makes no sense: {error!r}") from error
    problem = first_problem(config)
    if problem is not None:
        raise ModelError(f"{path}: {problem}")
    return config


def _refuse_quantised(folder: Path, hf: HFConfig) -> None:
    """Weights that another tool has packed would be read as nonsense."""
    advice = "which cannot be served; take the unquantised model, or a GGUF file of it"
    for key in ("quantization_config", "compression_config"):
        section = hf.section(key)
        if section is not None:
            method = section.get("quant_method", str, "an unnamed method")
            raise ModelError(f"{hf.path}: the weights are quantised with {method}, {advice}")
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        if (folder / name).exists():
            raise ModelError(f"{folder / name}: the weights were quantised by another tool, {advice}")
