"""A Hugging Face config.json, read strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ModelError

_Kind = TypeVar("_Kind", bool, int, float, str)


class HFConfig:
    """Typed access to the fields of a config.json. A field that is null counts as absent."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def open(cls, path: Path) -> HFConfig:
        """Raises ModelError naming the file and what is wrong with it."""
        try:
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ModelError(f"{path}: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path}: not a JSON object")
        return cls(path, values)

    def with_defaults(self, defaults: Mapping[str, Any]) -> HFConfig:
        """The same file, read as if absent fields had these values."""
        stated = {key: value for key, value in self.values.items() if value is not None}
        return HFConfig(self.path, {**defaults, **stated})

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, kind: type[_Kind], default: _Kind) -> _Kind:
        """The field, or `default` where it is absent. Integers count as floats."""
        return self.require(key, kind) if key in self else default

    def optional(self, key: str, kind: type[_Kind]) -> _Kind | None:
        """The field, or None where it is absent."""
        return self.require(key, kind) if key in self else None

    def require(self, key: str, kind: type[_Kind]) -> _Kind:
        """Raises ModelError if the field is absent or of another kind."""
        value = self.values.get(key)
        if value is None:
            raise ModelError(f"{self.path}: the field {key!r} is missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(f"{self.path}: the field {key!r} should be of type {kind.__name__}, not {value!r}")
        return value

    def list_of(self, key: str, kind: type[_Kind], length: int) -> tuple[_Kind, ...] | None:
        """A list of exactly `length` entries, or None where it is absent."""
        values = self.values.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != length:
            raise ModelError(f"{self.path}: the field {key!r} should be a list of {length} entries")
        entries = HFConfig(self.path, {f"{key}[{i}]": value for i, value in enumerate(values)})
        return tuple(entries.require(entry, kind) for entry in entries.values)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers of any length; empty where it is absent."""
        values = self.values.get(key)
        return self.list_of(key, int, len(values) if isinstance(values, list) else 0) or ()

    def section(self, key: str) -> HFConfig | None:
        """A nested object, or None where it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ModelError(f"{self.path}: the field {key!r} should be an object")
        return HFConfig(self.path, value)
