"""The model families that come with this package: one file each, data and pure functions only."""

from __future__ import annotations

from typing import Final

from engine.models.architecture import Architecture
from engine.models.archs.gemma2 import GEMMA2
from engine.models.archs.gemma3 import GEMMA3
from engine.models.archs.gpt2 import GPT2
from engine.models.archs.llama import LLAMA
from engine.models.archs.mistral import MISTRAL
from engine.models.archs.mixtral import MIXTRAL
from engine.models.archs.olmo2 import OLMO2
from engine.models.archs.phi3 import PHI3
from engine.models.archs.qwen2 import QWEN2
from engine.models.archs.qwen2_moe import QWEN2_MOE
from engine.models.archs.qwen3 import QWEN3
from engine.models.archs.qwen3_moe import QWEN3_MOE
from engine.models.archs.smollm3 import SMOLLM3

BUILT_IN: Final[tuple[Architecture, ...]] = (
    LLAMA,
    MISTRAL,
    SMOLLM3,
    QWEN2,
    QWEN3,
    GEMMA2,
    GEMMA3,
    PHI3,
    OLMO2,
    GPT2,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
)
