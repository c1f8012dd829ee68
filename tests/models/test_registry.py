"""Families are data, in their place, and can come from outside."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import ModelError
from engine.models import archs
from engine.models.archs import BUILT_IN
from engine.models.inspect import inspect_model
from engine.models.loader import load_model, open_model
from kernels.interface import KernelSet
from server.packaged_models import PACKAGED_MODELS
from tests.models.driver import Driver
from tests.models.tiny import EVEN, PROMPT_LENGTH, TinyModel, reference_logits, save

ROOT = Path(__file__).parents[2]
ARCHS = Path(archs.__file__).parent
PACKAGES = ("engine", "kernels", "monitoring", "server")  # loadtest knows other servers by name, not models
# What files on disk and packages are called is said where they are read; nothing there decides how a model computes.
MAY_NAME_FAMILIES = {
    "server/text/pretokenizers.py": "the ids of pre-tokenizers in GGUF files",
    "server/text/gguf_tokenizer.py": "the kinds of tokenizers in GGUF files, and what these leave out of one",
    "server/packaged_models.py": "the names of packages and of files in them",
}
OTHER_THINGS = ("llama.cpp", "gpt-2's mapping", *(model.name for model in PACKAGED_MODELS))
DOCUMENT = ROOT / "docs" / "adding-a-model.md"

ARCH_FILES = sorted(ARCHS.glob("[!_]*.py"))


def _family_names() -> set[str]:
    names: set[str] = set()
    for family in BUILT_IN:
        names |= {family.name, family.name.split("-")[0].split()[0]}
        names |= {*family.hf_classes, *family.hf_types, *family.gguf_types}
    return {name.lower() for name in names}


def test_no_family_is_named_outside_archs() -> None:
    """Outside means everywhere but where the files' own words are read."""
    family = re.compile(rf"(?<![a-z0-9])({'|'.join(map(re.escape, sorted(_family_names())))})(?![a-z0-9])")
    other_things = re.compile("|".join(map(re.escape, OTHER_THINGS)))
    found: dict[str, list[str]] = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if path.parent != ARCHS:
            for number, line in enumerate(path.read_text().lower().splitlines(), 1):
                for match in family.finditer(other_things.sub("", line)):
                    found.setdefault(str(path.relative_to(ROOT)), []).append(f"line {number}: {match[0]}")
    assert {path: lines for path, lines in found.items() if path not in MAY_NAME_FAMILIES} == {}
    assert set(found) == set(MAY_NAME_FAMILIES)  # no exception that nothing needs


def test_the_search_for_families_would_find_one() -> None:
    names = _family_names()
    assert {"llama", "gemma3", "qwen2moe", "gemma2forcausallm", "gpt-2", "phi3", "smollm3"} <= names


@pytest.mark.parametrize("path", ARCH_FILES, ids=lambda path: path.stem)
def test_a_family_is_short_and_holds_data_and_functions_only(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) < 90
    tree = ast.parse(source)
    allowed = (ast.Import, ast.ImportFrom, ast.AnnAssign, ast.FunctionDef)
    assert [node for node in tree.body[1:] if not isinstance(node, allowed)] == []
    assert isinstance(tree.body[0], ast.Expr)  # the docstring
    assert set(_imports(tree)) <= {"__future__", "dataclasses", "typing", "engine", "kernels"}
    constants = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    assert all(ast.unparse(node.annotation).startswith("Final") for node in constants)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).split(".")[0]


def test_no_two_families_claim_the_same_name() -> None:
    for attribute in ("hf_classes", "hf_types", "gguf_types"):
        claims = [name for family in BUILT_IN for name in getattr(family, attribute)]
        assert len(claims) == len(set(claims))


def test_a_family_can_be_added_from_outside_as_the_document_says(
    kernels: KernelSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyModel(
        "quill",
        "granite",
        EVEN
        | {
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.7,
            "tie_word_embeddings": True,
        },
    )
    model = tiny.build()
    folder = _as_quill(save(model, tmp_path / "model"))
    with pytest.raises(ModelError, match="'QuillForCausalLM'"):
        open_model(folder)
    _install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert inspect_model(folder, 10**9).problem is None
    decoder = load_model(open_model(folder), kernels, PROMPT_LENGTH, PROMPT_LENGTH)
    logits = Driver(decoder, kernels).run(0, tiny.prompt, chunk=20)
    np.testing.assert_allclose(logits, reference_logits(model, tiny.prompt), rtol=0, atol=1e-4)


def test_an_entry_point_that_is_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(TinyModel("plain", "llama", EVEN).build(), tmp_path / "model")
    for value, reason in (("no_such_module:X", "cannot be loaded"), ("json:JSONDecoder", "is no Architecture")):
        site = tmp_path / value.split(":")[0]
        _write_distribution(site, "octavo-broken", "1.0", {"broken": value})
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(site))
            with pytest.raises(ModelError, match=f"{value}.*{reason}"):
                open_model(folder)


def _install(site: Path) -> None:
    """What pip would make of the document's two code blocks."""
    text = DOCUMENT.read_text()
    [module] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [project] = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]
    entry_points = project["project"]["entry-points"]["octavo.architectures"]
    _write_distribution(site, project["project"]["name"], project["project"]["version"], entry_points)
    (site / "octavo_quill.py").write_text(module)


def _write_distribution(site: Path, name: str, version: str, entry_points: dict[str, str]) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[octavo.architectures]", *lines, ""]))


_RENAMED = {
    "model.": "quill.",
    "embed_tokens": "tokens",
    "layers": "blocks",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "quill.norm": "quill.last_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
_FIELDS = {
    "embedding_multiplier": "embedding_gain",
    "residual_multiplier": "branch_gain",
    "attention_multiplier": "score_scale",
    "logits_scaling": "logit_divisor",
}


def _as_quill(folder: Path) -> Path:
    """A model of a real family that does the same arithmetic, under Quill's names."""
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quill = {_FIELDS.get(key, key): value for key, value in config.items()}
    quill |= {"architectures": ["QuillForCausalLM"], "model_type": "quill"}
    (folder / "config.json").write_text(json.dumps(quill))
    return folder
