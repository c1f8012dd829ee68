"""From a folder in Hugging Face layout, or a GGUF file, to a Decoder.

files = open_model(path)                     # cheap: configuration and headers
decoder = load_model(files, kernels, …)      # reads the weights
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from engine.errors import ModelError
from engine.models.architecture import WeightNames
from engine.models.checkpoint import Checkpoint, DummyWeights, Progress, Weights
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.gguf_file import GGUFFile
from engine.models.gguf_source import GGUFSource
from engine.models.hf_config import HFConfig
from engine.models.registry import find_gguf, find_hf
from engine.models.safetensors_source import SafetensorsSource
from engine.models.source import TensorSource
from engine.models.weights import WeightPacker
from kernels.interface import KernelSet

CONFIG_FILE: Final = "config.json"
LoadFormat = Literal["auto", "dummy"]


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
    raise ModelError(f"{path}: neither a folder in Hugging Face layout nor a .gguf file; it was not opened")


def load_model(
    files: OpenedModel,
    kernels: KernelSet,
    max_model_len: int,
    max_num_batched_tokens: int,
    progress: Progress | None = None,
    dummy_seed: int = 0,
) -> Decoder:
    """Read the weights, tensor by tensor, into the kernels' layout. `progress` gets (bytes done, bytes in all).

    Raises ModelError naming file, tensor and reason; ValueError from kernels that cannot take a weight's type.
    """
    weights: Weights
    if files.source is None:
        weights = DummyWeights(dummy_seed)
    else:
        weights = Checkpoint(files.source, files.names, files.config.tied_head, progress)
    packed = WeightPacker(files.config, weights, kernels).pack()
    return Decoder(files.config, packed, kernels, max_num_batched_tokens, max_model_len)


def _open_folder(folder: Path, load_format: LoadFormat) -> OpenedModel:
    hf = HFConfig.open(folder / CONFIG_FILE)
    _refuse_quantised(hf)
    family = find_hf(hf)
    if family.config_from_hf is None or family.hf_names is None:
        raise ModelError(f"{folder}: {family.name} is known from GGUF files only")
    source = SafetensorsSource(folder) if load_format == "auto" else None
    return OpenedModel(folder, family.name, family.config_from_hf(hf), family.hf_names, source)


def _open_gguf(path: Path, load_format: LoadFormat) -> OpenedModel:
    gguf = GGUFFile.open(path)
    family = find_gguf(gguf)
    if family.config_from_gguf is None or family.gguf_names is None:
        raise ModelError(f"{path}: {family.name} is known from folders in Hugging Face layout only")
    source = GGUFSource(gguf) if load_format == "auto" else None
    return OpenedModel(path, family.name, family.config_from_gguf(gguf), family.gguf_names, source)


def _refuse_quantised(hf: HFConfig) -> None:
    """Weights that another tool has packed would be read as nonsense."""
    quantisation = hf.section("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method", str, "an unknown method")
        raise ModelError(
            f"{hf.path}: the weights are quantised with {method}, which is not supported; take the unquantised "
            "model or a GGUF file of it"
        )
