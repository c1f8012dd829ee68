"""`octavo cache`: what is kept of packed models, and how to be rid of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.models.packed_cache import PackedCache, folder_bytes
from server.settings import load_settings

_ABOUT = """\
Packed models: weights as the kernels have laid them out, with the model's configuration, tokenizer and chat template.
`octavo serve` makes them at its first start with a model and maps them into memory at later ones. They can be removed
at any time; the next start packs again. Those of models that have changed or are gone go by themselves when a model is
packed.
"""


def main(arguments: Sequence[str]) -> int:
    """List what is there, or remove it; 0."""
    parser = argparse.ArgumentParser(
        prog="octavo cache", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clear", action="store_true", help="remove all of them")
    parser.add_argument("--prune", action="store_true", help="remove those of models that have changed or are gone")
    parser.add_argument("--cache-dir", type=Path, help="as of octavo serve")
    parser.add_argument("--packed-cache-dir", type=Path, help="as of octavo serve")
    options = parser.parse_args(arguments)
    names = ("cache_dir", "packed_cache_dir")
    flags = {name: value for name in names if (value := getattr(options, name)) is not None}
    settings = load_settings(flags).settings
    folder = settings.packed_cache_dir or settings.cache_dir / "packed"
    cache = PackedCache(folder)
    if options.clear:
        _say(f"removed {sum(map(cache.remove, cache.entries())) / 1e6:,.0f} MB from {folder}")
    elif options.prune:
        _say(f"removed {cache.prune() / 1e6:,.0f} MB from {folder}")
    else:
        _list(cache, folder)
    return 0


def _list(cache: PackedCache, folder: Path) -> None:
    entries = cache.entries()
    for entry in entries:
        forms = ", ".join(path.stem.removeprefix("weights-") for path in entry.weights()) or "no weights"
        _say(f"{folder_bytes(entry.folder) / 1e6:8,.0f} MB  {entry.source}  ({forms})")
    _say(f"{sum(folder_bytes(entry.folder) for entry in entries) / 1e6:8,.0f} MB  in {folder}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
