"""What form a request wants its answer in: `response_format` and the fields that other servers have for the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from server.errors import InvalidRequest, NotSupported
from server.protocol.common import JsonObject
from server.protocol.constraints import ConstraintFields
from server.structured.grammar import (
    WHITESPACE,
    GrammarBuilder,
    GrammarError,
    choices_rule,
    lark_of,
    regex_terminal,
)
from server.structured.schema import SchemaError, prepare

MAX_CHOICES: Final = 10_000
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_STRUCTURED: Final = ("json", "regex", "choice", "grammar", "json_object")
_OPTIONS: Final = ("disable_any_whitespace", "whitespace_pattern")
_ANY_OBJECT: Final[JsonObject] = {"type": "object"}

# A field of the request → its place in `structured_outputs`.
_FIELDS: Final[Mapping[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A rule that the answer's text must match, and the field that asks for it."""

    rule: Callable[[GrammarBuilder], str]  # adds its parts to a grammar, returns the rule's body
    param: str


def output_format(body: ConstraintFields) -> OutputFormat | None:
    """None for free text. Raises InvalidRequest, NotSupported."""
    wanted = [_response_format(body.response_format)] if body.response_format is not None else []
    if body.structured_outputs is not None:
        wanted.append(_structured_outputs(body.structured_outputs))
    for name, kind in _FIELDS.items():
        if (value := getattr(body, name)) is not None:
            wanted.append(_kind(kind, value, name, WHITESPACE))
    formats = [found for found in wanted if found is not None]
    if len(formats) > 1:
        names = f"{formats[0].param} and {formats[1].param}"
        raise InvalidRequest(f"{formats[1].param}: {names} exclude each other", param=formats[1].param)
    return formats[0] if formats else None


def _response_format(form: JsonObject) -> OutputFormat | None:
    param = "response_format"
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = form.get("schema", form.get("value"))
        return _json(_ANY_OBJECT if schema is None else schema, param, WHITESPACE)
    if kind == "json_schema":
        return _json(_named_schema(form), param, WHITESPACE)
    if kind == "regex":
        return _kind("regex", form.get("regex", form.get("value", form.get("pattern"))), param, WHITESPACE)
    raise NotSupported(
        f"response_format: type {str(kind)[:40]!r} is not supported, only text, json_object, json_schema and regex",
        param=param,
    )


def _named_schema(form: JsonObject) -> object:
    """OpenAI's {name, strict, schema}. A schema is enforced whether strict or not. Raises InvalidRequest."""
    param, named = "response_format", form.get("json_schema")
    if not isinstance(named, dict):
        raise InvalidRequest("response_format.json_schema: an object with name and schema is required", param=param)
    name = named.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            "response_format.json_schema.name: a name has 1 to 64 letters, digits, underscores or dashes", param=param
        )
    if named.get("strict") not in (None, True, False):
        raise InvalidRequest("response_format.json_schema.strict: must be true or false", param=param)
    if "schema" not in named and named.get("strict"):
        raise InvalidRequest("response_format.json_schema.schema: required with strict", param=param)
    return named.get("schema", _ANY_OBJECT)


def _structured_outputs(form: JsonObject) -> OutputFormat | None:
    param = "structured_outputs"
    given = {key: value for key, value in form.items() if value is not None and value is not False}
    if unknown := sorted(given.keys() - {*_STRUCTURED, *_OPTIONS}):
        raise NotSupported(f"{param}.{unknown[0][:40]}: not supported", param=param)
    kinds = [key for key in _STRUCTURED if key in given]
    if len(kinds) != 1:
        raise InvalidRequest(f"{param}: exactly one of {', '.join(_STRUCTURED)}", param=param)
    whitespace = given.get("whitespace_pattern", WHITESPACE)
    if not isinstance(whitespace, str):
        raise InvalidRequest(f"{param}.whitespace_pattern: must be a string", param=param)
    compact = None if given.get("disable_any_whitespace") else whitespace
    value = _ANY_OBJECT if kinds[0] == "json_object" else given[kinds[0]]
    return _kind("json" if kinds[0] == "json_object" else kinds[0], value, param, compact)


def _kind(kind: str, value: Any, param: str, whitespace: str | None) -> OutputFormat:
    if kind == "json":
        return _json(value, param, whitespace)
    if kind == "choice":
        return _choice(value, param)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param}: a text is required", param=param)
    if kind == "regex":
        return OutputFormat(lambda builder: builder.rule("ANSWER", regex_terminal(value)), param)
    try:
        lark = lark_of(value)
    except GrammarError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error
    return OutputFormat(lambda builder: builder.lark(lark), param)


def _json(schema: Any, param: str, whitespace: str | None) -> OutputFormat:
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"{param}: not valid JSON: {error}", param=param) from error
    try:
        prepared = prepare(schema)
    except SchemaError as error:
        raise NotSupported(f"{param}: {error}", param=param) from error
    return OutputFormat(lambda builder: builder.schema(prepared, whitespace), param)


def _choice(choices: Any, param: str) -> OutputFormat:
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise InvalidRequest(f"{param}: a list of texts is required", param=param)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"{param}: {len(choices)} choices, at most {MAX_CHOICES} are allowed", param=param)
    return OutputFormat(lambda builder: builder.rule("choice", choices_rule(tuple(dict.fromkeys(choices)))), param)
