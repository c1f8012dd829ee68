"""What a model family is to the loader: how its configuration reads and what its tensors are called.

A family is data: one `Architecture`. Those of this package stand in `engine.models.archs`; others come from installed
packages through the entry point group `octavo.architectures` (docs/adding-a-model.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from engine.models.config import ModelConfig
from engine.models.gguf_file import GGUFFile
from engine.models.hf_config import HFConfig


@dataclass(frozen=True, slots=True)
class WeightNames:
    """What a family calls its tensors in one file format.

    `stems` maps the decoder's names to the file's, without ".weight" and ".bias". A stem may hold {prefix}, {layer}
    and {expert}; an expert's stem without {expert} names one tensor that holds all experts, stacked.

    The decoder's names. Once: embedding, positions, final_norm, head. Per layer: attention_norm, q, k, v (or qkv, one
    above the other), q_norm, k_norm, o, attention_post_norm, mlp_norm, gate, up (or gate_up), down, mlp_post_norm.
    Sparse layers: router, expert_gate, expert_up (or expert_gate_up), expert_down, and of a shared expert
    shared_gate, shared_up, shared_down, shared_router.
    """

    stems: Mapping[str, str]
    prefixes: tuple[str, ...] = ("",)  # the first one under which the embedding exists is the file's {prefix}
    ignored: tuple[str, ...] = ()  # regular expressions: tensors that are no weights of the decoder
    norm_offset: float = 0.0  # added to the weight of every norm
    transposed: bool = False  # linear weights of the layers are (in, out)
    interleaved_rope: bool = False  # rows of q and k are ordered for pairs (2i, 2i + 1)

    def with_stems(self, stems: Mapping[str, str]) -> WeightNames:
        """The same names but for these."""
        return replace(self, stems={**self.stems, **stems})


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model family."""

    name: str
    hf_classes: tuple[str, ...] = ()  # entries of config.json's `architectures`
    hf_types: tuple[str, ...] = ()  # its `model_type`, for files that name no class
    gguf_types: tuple[str, ...] = ()  # GGUF's `general.architecture`
    config_from_hf: Callable[[HFConfig], ModelConfig] | None = None
    config_from_gguf: Callable[[GGUFFile], ModelConfig] | None = None
    hf_names: WeightNames | None = None
    gguf_names: WeightNames | None = None
