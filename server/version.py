"""Which Octavo this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """Of the installed distribution."""
    try:
        return importlib.metadata.version("octavo")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
