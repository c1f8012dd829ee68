"""Ready-made comparisons of Octavo with itself, as data in presets.toml."""

from __future__ import annotations

import shlex
import sys
import tomllib
from importlib import resources
from pathlib import Path

import msgspec
from msgspec import Struct

from loadtest.errors import BenchError
from loadtest.launch import ServerSpec

_WEIGHTS = "{weights}"


class Variant(Struct, frozen=True, forbid_unknown_fields=True):
    """One server of a preset: `octavo serve` with flags, or another command."""

    flags: str = ""
    command: str = ""  # instead of `octavo serve`; {port}, {python} and {weights} are filled in
    sessions: int | None = None  # only so many of the workload's, for what would take too long
    drop: tuple[str, ...] = ()  # request fields that this server would refuse


class Preset(Struct, frozen=True, forbid_unknown_fields=True):
    """Servers by name (the first is the baseline) and the workloads that tell them apart."""

    description: str
    workloads: tuple[str, ...]
    variants: dict[str, str | Variant]
    flags: str = ""  # of `octavo serve`, before each variant's own
    api_key: str = ""  # for what no request class brings a key of its own for

    def variant(self, name: str) -> Variant:
        """The named one in its long form."""
        found = self.variants[name]
        return Variant(flags=found) if isinstance(found, str) else found

    def servers(self, serve: str, weights: Path | None = None) -> list[ServerSpec]:
        """The servers to start; `serve` is how Octavo is started, `weights` the folder of the unquantised model.

        Raises BenchError if a variant needs it and there is none.
        """
        found = []
        for name in self.variants:
            variant = self.variant(name)
            octavo = f"{serve} --host 127.0.0.1 --port {{port}} {self.flags} {variant.flags}"
            command = " ".join((variant.command or octavo).split())
            if _WEIGHTS in command:
                if weights is None:
                    raise BenchError(f"{name} needs --weights: the unquantised model, from scripts/unquantise.py")
                command = command.replace(_WEIGHTS, shlex.quote(str(weights)))
            found.append(ServerSpec(name, command=command.replace("{python}", shlex.quote(sys.executable))))
        return found


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
