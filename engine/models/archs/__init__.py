"""The model families that come with this package: one file each, data and pure functions only."""

from __future__ import annotations

from typing import Final

from engine.models.architecture import Architecture
from engine.models.archs.llama import LLAMA

BUILT_IN: Final[tuple[Architecture, ...]] = (LLAMA,)
