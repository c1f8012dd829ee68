"""Which family a model belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Final

from engine.errors import ModelError
from engine.models.architecture import Architecture
from engine.models.archs import BUILT_IN
from engine.models.gguf_file import GGUFFile
from engine.models.hf_config import HFConfig

ENTRY_POINTS: Final = "octavo.architectures"


def architectures() -> Iterator[Architecture]:
    """Every family known here: those of installed packages first, so that they may replace a built-in one.

    Raises ModelError naming the package whose entry point cannot be loaded.
    """
    for entry_point in entry_points(group=ENTRY_POINTS):
        where = f"the entry point {entry_point.value} of the group {ENTRY_POINTS}"
        try:
            architecture = entry_point.load()
        except (ImportError, AttributeError) as error:
            raise ModelError(f"{where} cannot be loaded: {error}") from error
        if not isinstance(architecture, Architecture):
            raise ModelError(f"{where} is no Architecture but {type(architecture).__name__}")
        yield architecture
    yield from BUILT_IN


def find_hf(hf: HFConfig) -> Architecture:
    """The family of a config.json. Raises ModelError naming what the file says and what is known."""
    classes = hf.values.get("architectures")
    if isinstance(classes, list) and classes:
        name, key = str(classes[0]), "architectures"
        found = _first(lambda arch: name in arch.hf_classes)
    else:
        name, key = hf.require("model_type", str), "model_type"
        found = _first(lambda arch: name in arch.hf_types)
    if found is None:
        known = sorted({cls for arch in architectures() for cls in arch.hf_classes})
        raise ModelError(f"{hf.path}: the architecture {name!r} ({key}) is not known; known are {', '.join(known)}")
    return found


def find_gguf(gguf: GGUFFile) -> Architecture:
    """The family of a GGUF file. Raises ModelError naming what the file says and what is known."""
    name = gguf.require("general.architecture", str)
    found = _first(lambda arch: name in arch.gguf_types)
    if found is None:
        known = sorted({kind for arch in architectures() for kind in arch.gguf_types})
        raise ModelError(
            f"{gguf.path}: the architecture {name!r} (general.architecture) is not known; known are {', '.join(known)}"
        )
    return found


def _first(matches: Callable[[Architecture], bool]) -> Architecture | None:
    return next((arch for arch in architectures() if matches(arch)), None)
