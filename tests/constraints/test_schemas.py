"""Twenty schemas of the kinds that people use: what the default model writes under them is valid."""

from __future__ import annotations

import json
from collections.abc import Callable

import jsonschema
import pytest

from engine.core.plan import SeqId
from engine.types import FinishReason
from server.text.tokenizer import Tokenizer
from tests.choices import request
from tests.constraints.conftest import PERSON, QUESTION, Schema, by_schema
from tests.runner.harness import Harness

TEXT: Schema = {"type": "string", "maxLength": 16}


def closed(**properties: Schema) -> Schema:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TREE: Schema = {
    "$defs": {
        "node": closed(name={"enum": ["a", "b"]}, left={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}),
        "leaf": closed(value={"type": "integer", "minimum": 0, "maximum": 99}),
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, Schema] = {
    "person": PERSON,
    "nested objects": closed(address=closed(street=TEXT, number={"type": "integer", "minimum": 1, "maximum": 999})),
    "array with bounds": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "array of objects": {"type": "array", "items": closed(k={"enum": [1, 2, 3]}), "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [TEXT, {"type": "null"}], "items": False, "minItems": 2},
    "enum of mixed types": {"enum": ["low", "high", 3, None, True]},
    "const": closed(version={"const": "1.0.2"}, kind={"const": 7}),
    "any of": {"anyOf": [closed(cat=TEXT), closed(dog={"type": "boolean"})]},
    "references": TREE,
    "date": closed(day={"type": "string", "format": "date"}),
    "uuid and address": closed(id={"type": "string", "format": "uuid"}, ip={"type": "string", "format": "ipv4"}),
    "e-mail": closed(mail={"type": "string", "format": "email", "maxLength": 24}),
    "integer in bounds": {"type": "integer", "minimum": -20, "maximum": 137},
    "number in bounds": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "length of a string": {"type": "string", "minLength": 3, "maxLength": 5},
    "unicode": closed(größe={"enum": ["klein", "groß", "中", "🙂"]}),
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "additionalProperties": False,
    },
    "additional properties": {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 3,
    },
    "multiple types": closed(value={"type": ["boolean", "null"]}),
}
# The default model's own words need not end within the tokens given, where a schema sets no bound.
OPEN_ENDED = ("additional properties", "number in bounds")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_valid(
    make: Callable[..., Harness], ask: Callable[[str], list[int]], tokenizer: Tokenizer, temperature: float
) -> None:
    """All twenty in one batch."""
    prompt, stop = ask(QUESTION), tokenizer.eos_token_ids
    outcomes = make().run(
        *[
            request(k, prompt, 120, constraint=by_schema(schema), temperature=temperature, seed=k, stop=stop)
            for k, schema in enumerate(SCHEMAS.values())
        ]
    )
    for k, (name, schema) in enumerate(SCHEMAS.items()):
        outcome = outcomes[SeqId(k, 0)]
        text = tokenizer.decode(outcome.token_ids, skip_special_tokens=False)
        assert outcome.error is None, name
        if name in OPEN_ENDED and outcome.finish_reason is FinishReason.LENGTH:
            continue
        assert outcome.finish_reason is FinishReason.STOP, (name, text)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def test_there_are_twenty() -> None:
    assert len(SCHEMAS) == 20
