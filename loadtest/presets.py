"""Ready-made comparisons of Octavo with itself, as data in presets.toml."""

from __future__ import annotations

import tomllib
from importlib import resources

import msgspec
from msgspec import Struct

from loadtest.errors import BenchError
from loadtest.launch import ServerSpec


class Preset(Struct, frozen=True, forbid_unknown_fields=True):
    """Variants of `octavo serve` (name → flags; the first is the baseline) and the workloads that tell them apart."""

    description: str
    workloads: tuple[str, ...]
    variants: dict[str, str]

    def servers(self, serve: str) -> list[ServerSpec]:
        """The servers to start, each by the command `serve` with the variant's flags."""
        return [
            ServerSpec(name, command=f"{serve} --host 127.0.0.1 --port {{port}} {flags}".rstrip())
            for name, flags in self.variants.items()
        ]


def builtin_presets() -> dict[str, Preset]:
    """The presets that come with the package, by name."""
    tables = tomllib.loads(resources.files("loadtest").joinpath("presets.toml").read_text("utf-8"))
    return {name: msgspec.convert(table, Preset) for name, table in tables.items()}


def find_preset(name: str) -> Preset:
    """Raises BenchError that lists the known ones."""
    presets = builtin_presets()
    if name not in presets:
        raise BenchError(f"no preset {name!r}; there are {', '.join(presets)}")
    return presets[name]
