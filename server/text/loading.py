"""What the server needs of a model's files to turn text into tokens and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final

from engine.errors import ModelError
from engine.models.gguf_file import GGUFFile
from server.text.chat_template import ChatTemplate, ChatTemplateError
from server.text.gguf_tokenizer import tokenizer_from_gguf
from server.text.hf_folder import TokenizerFolder
from server.text.tokenizer import Tokenizer

# Sampling keys of a GGUF file, by their names in a Hugging Face generation_config.json.
_GGUF_SAMPLING: Final[Mapping[str, str]] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_GGUF_NAMED: Final[Mapping[str, str]] = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


@dataclass(frozen=True, slots=True)
class LoadedText:
    """The text side of a model."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None: the model has none
    sampling_defaults: Mapping[str, float]  # temperature, top_k, …: what the model's authors recommend
    special_texts: Mapping[str, str]  # bos_token, eos_token, …: variables of chat templates


def load_tokenizer(path: str | PathLike[str]) -> LoadedText:
    """The text side of a folder in Hugging Face layout or of a .gguf file.

    Raises ModelError naming the file and the reason.
    """
    path = Path(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_folder(path: Path) -> LoadedText:
    folder = TokenizerFolder(path)
    tokenizer = folder.tokenizer()
    special = folder.special_texts()
    template = _template(path, folder.chat_templates(), special)
    return LoadedText(tokenizer, template, folder.sampling_defaults(), special)


def _from_gguf(path: Path) -> LoadedText:
    file = GGUFFile.open(path)
    tokenizer = tokenizer_from_gguf(file)
    key = "tokenizer.chat_template"
    sources = {
        name.removeprefix(f"{key}."): file.require(name, str) for name in file.metadata if name.startswith(f"{key}.")
    }
    if key in file.metadata:
        sources["default"] = file.require(key, str)
    special = {}
    for gguf_name, name in _GGUF_NAMED.items():
        token_id = file.get(f"tokenizer.ggml.{gguf_name}_token_id", int, -1)
        if token_id >= 0:
            special[name] = tokenizer.token_text(token_id)
    defaults = {name: file.require(key, float) for key, name in _GGUF_SAMPLING.items() if key in file.metadata}
    return LoadedText(tokenizer, _template(path, sources, special), defaults, special)


def _template(path: Path, sources: Mapping[str, str], special_texts: Mapping[str, str]) -> ChatTemplate | None:
    if not sources:
        return None
    try:
        return ChatTemplate(sources, special_texts)
    except ChatTemplateError as error:
        raise ModelError(f"{path}: {error}") from error
