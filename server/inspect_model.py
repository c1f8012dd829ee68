"""`octavo inspect MODEL`: what a model's files hold, what they need, and whether that fits here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.hardware import available_memory_bytes
from engine.models.inspect import inspect_model, render
from server.model_store import ModelNotFound, resolve_model
from server.packaged_models import listing
from server.settings import DEFAULT_MODEL, load_settings


def main(arguments: Sequence[str]) -> int:
    """Print the report; 0 if the model can be served, else 1."""
    parser = argparse.ArgumentParser(
        prog="octavo inspect",
        description="What a model's files hold, what they need, and whether that fits here.",
        epilog=f"known names:\n{listing()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="folder, .gguf file, Hub id or known name")
    parser.add_argument("--cache-dir", type=Path, help="where downloaded models are kept (also OCTAVO_CACHE)")
    options = parser.parse_args(arguments)
    flags = {} if options.cache_dir is None else {"cache_dir": options.cache_dir}
    try:
        files = resolve_model(options.model, load_settings(flags).settings.cache_dir)
    except ModelNotFound as error:
        print(f"octavo inspect: {error}", file=sys.stderr)  # noqa: T201
        return 1
    report = inspect_model(files.path, available_memory_bytes())
    print(render(report))  # noqa: T201
    return 0 if report.problem is None else 1
