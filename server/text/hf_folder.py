"""A tokenizer and what belongs to it from a folder in Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.errors import ModelError
from server.text.library import library_errors
from server.text.tokenizer import Tokenizer

_MIB: Final = 1 << 20
_MAX_TOKENIZER_BYTES: Final = 128 * _MIB  # the largest in use have about 35 MiB
_MAX_CONFIG_BYTES: Final = 16 * _MIB
_MAX_TEMPLATE_BYTES: Final = 2 * _MIB
SAMPLING_FIELDS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFolder:
    """The text files of a model folder, read once and bounded in size.

    Every method raises ModelError naming the file and what is wrong with it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder
        self._tokenizer_config: Final = self._json("tokenizer_config.json")
        self._model_config: Final = self._json("config.json")
        self._generation_config: Final = self._json("generation_config.json")

    def tokenizer(self) -> Tokenizer:
        path = self._folder / "tokenizer.json"
        with library_errors(ModelError, f"{path}: no valid tokenizer"):
            backend = Backend.from_str(self._text(path.name, _MAX_TOKENIZER_BYTES))
            self._add_configured_tokens(backend)
            return Tokenizer(
                backend,
                bos_token_id=self._named_id(backend, "bos_token"),
                eos_token_ids=self._eos_token_ids(backend),
            )

    def special_texts(self) -> dict[str, str]:
        """The named special tokens (bos_token, eos_token, …) that the tokenizer's configuration sets."""
        return {name: text for name in _NAMED_TOKENS if (text := _token_text(self._tokenizer_config.get(name)))}

    def chat_templates(self) -> dict[str, str]:
        """Jinja sources by name; "default" is the one for ordinary use. Empty if the model has none."""
        templates = {}
        configured = self._tokenizer_config.get("chat_template")
        if configured is None:
            configured = self._json("chat_template.json").get("chat_template")
        if isinstance(configured, str):
            templates["default"] = configured
        elif isinstance(configured, list):
            with library_errors(ModelError, f"{self._folder / 'tokenizer_config.json'}: no list of chat templates"):
                templates = {str(entry["name"]): str(entry["template"]) for entry in configured}
        if (self._folder / "chat_template.jinja").exists():
            templates["default"] = self._text("chat_template.jinja", _MAX_TEMPLATE_BYTES)
        for path in sorted((self._folder / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = self._text(str(path.relative_to(self._folder)), _MAX_TEMPLATE_BYTES)
        return templates

    def sampling_defaults(self) -> dict[str, float]:
        """What generation_config.json recommends for the fields in SAMPLING_FIELDS."""
        found = {key: self._generation_config.get(key) for key in SAMPLING_FIELDS}
        return {key: float(value) for key, value in found.items() if isinstance(value, (int, float))}

    # Files

    def _text(self, name: str, max_bytes: int) -> str:
        path = self._folder / name
        try:
            size = path.stat().st_size
            if size > max_bytes:
                raise ModelError(f"{path}: {size // _MIB} MiB; more than {max_bytes // _MIB} MiB is not read")
            return path.read_text("utf-8")
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: not UTF-8 at byte {error.start}") from None

    def _json(self, name: str) -> Mapping[str, Any]:
        """An optional file that holds a JSON object; empty if there is no such file."""
        path = self._folder / name
        if not path.exists():
            return {}
        try:
            value = json.loads(self._text(name, _MAX_CONFIG_BYTES))
        except ValueError as error:
            raise ModelError(f"{path}: no valid JSON: {error}") from None
        except RecursionError:
            raise ModelError(f"{path}: nested too deeply") from None
        if not isinstance(value, dict):
            raise ModelError(f"{path}: holds no JSON object")
        return value

    # Tokens

    def _named_id(self, backend: Backend, name: str) -> int | None:
        text = _token_text(self._tokenizer_config.get(name))
        token_id: int | None = backend.token_to_id(text) if text else None
        return token_id

    def _eos_token_ids(self, backend: Backend) -> list[int]:
        """From every place that lists them."""
        ids = [self._named_id(backend, "eos_token")]
        nested = self._model_config.get("text_config")
        for config in (self._model_config, nested if isinstance(nested, dict) else {}, self._generation_config):
            listed = config.get("eos_token_id")
            ids += listed if isinstance(listed, list) else [listed]
        return [token_id for token_id in ids if isinstance(token_id, int)]

    def _add_configured_tokens(self, backend: Backend) -> None:
        """Tokens that only tokenizer_config.json names as added or special."""
        declared = self._tokenizer_config.get("added_tokens_decoder") or {}
        for token_id, token in sorted(declared.items(), key=lambda item: int(item[0])):
            if backend.token_to_id(token["content"]) is None:
                backend.add_tokens([AddedToken(**{k: v for k, v in token.items() if k != "__type"})])
                if backend.token_to_id(token["content"]) != int(token_id):
                    raise ModelError(
                        f"{self._folder / 'tokenizer_config.json'}: token {token['content']!r} is declared with id "
                        f"{token_id}, which does not follow those of tokenizer.json"
                    )
        added = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        missing = [t for t in self._special_texts() if t not in added and backend.token_to_id(t) is not None]
        backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in missing])

    def _special_texts(self) -> Iterator[str]:
        yield from self.special_texts().values()
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = self._tokenizer_config.get(key) or []
            for token in listed.values() if isinstance(listed, dict) else listed:
                if text := _token_text(token):
                    yield text


def _token_text(value: object) -> str | None:
    """The text of a token that a configuration gives as a string or as an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
