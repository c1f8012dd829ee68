"""Schemas: what is enforced, what is refused and how it is named."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.structured.schema import SchemaError, prepare
from tests.server.structured.matching import accepts, begins, builder


def enforced(schema: Any) -> str:
    """The grammar of a schema."""
    grammar = builder()
    return grammar.build(grammar.schema(prepare(schema)))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "#: 'not'"),
        ({"type": "object", "properties": {"a": {"uniqueItems": True}}}, "#/properties/a: 'uniqueItems'"),
        ({"$defs": {"x": {"contains": {}}}}, "#/$defs/x: 'contains'"),
        ({"anyOf": [{}, {"propertyNames": {"maxLength": 3}}]}, "#/anyOf/1: 'propertyNames'"),
        ({"items": {"dependentRequired": {"a": ["b"]}}}, "#/items: 'dependentRequired'"),
        ({"if": {"type": "string"}, "then": {"maxLength": 1}}, "#: 'if'"),
        ({"unevaluatedProperties": False}, "#: 'unevaluatedProperties'"),
        ({"type": "string", "format": "idn-email"}, "#: 'format' 'idn-email'"),
        ({"$ref": "https://example.org/schema"}, "#: '$ref'"),
        ({"type": "object", "minProperties": 2}, "#: 'minProperties'"),
        ({"properties": 3}, "#/properties: must be an object"),
        ({"anyOf": {}}, "#/anyOf: must be a list"),
        ({"items": "string"}, "#/items: a schema is an object or a boolean"),
        ("string", "#: a schema is an object or a boolean"),
        (False, "#: the schema allows no value"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: Any, named: str) -> None:
    with pytest.raises(SchemaError) as refused:
        prepare(schema)
    assert str(refused.value).startswith(named)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"$ref": "#"}]},
        {"allOf": [{"type": "string"}, {"$ref": "#"}]},
    ],
)
def test_a_schema_without_a_finite_value_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaError, match="without end"):
        prepare(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}]},
        {"$defs": {"n": {"type": "integer"}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}},
    ],
)
def test_recursion_that_can_end_is_taken(schema: Any) -> None:
    prepare(schema)


def test_keywords_that_say_nothing_are_left_out() -> None:
    schema = {
        "type": "array",
        "uniqueItems": False,
        "minContains": 2,
        "if": {"type": "null"},
        "x-guidance": {"lenient": 1},
    }
    assert prepare(schema) == {"type": "array"}
    assert prepare(True) == {}
    assert prepare({"type": "string", "format": "password"}) == {"type": "string"}


def test_integer_formats_are_bounds() -> None:
    assert prepare({"type": "integer", "format": "int32", "minimum": 0}) == {
        "type": "integer",
        "minimum": 0,
        "maximum": 2**31 - 1,
    }


def test_values_of_enums_and_names_of_properties_are_no_keywords() -> None:
    schema = {"type": "object", "properties": {"not": {"enum": [{"not": 1}]}, "format": {"const": {"$ref": "x://y"}}}}
    assert prepare(schema) == schema | {"additionalProperties": False}


def test_objects_that_list_their_properties_have_no_others_unless_the_schema_says_so() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = enforced({"type": "object", "properties": {"x": inner, "y": {"anyOf": [inner, {"type": "null"}]}}})
    assert accepts(grammar, '{"x": {"a": 1}, "y": {"a": 2}}')
    assert not begins(grammar, '{"z"')
    assert not begins(grammar, '{"x": {"b"')
    assert accepts(enforced(inner | {"additionalProperties": True}), '{"a": 1, "b": 2}')
    assert accepts(enforced(inner | {"required": ["b"]}), '{"a": 1, "b": 2}')


def test_objects_whose_schemas_are_put_together_stay_open() -> None:
    parts = [{"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in ("a", "b")]
    assert accepts(enforced({"allOf": parts}), '{"a": 1, "b": 2}')


def test_depth_is_bounded() -> None:
    schema: Any = {}
    for _ in range(2000):
        schema = {"items": schema}
    with pytest.raises(SchemaError, match="levels deep"):
        prepare(schema)


def test_blanks_between_the_parts_of_json_are_bounded() -> None:
    grammar = enforced({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert accepts(grammar, '{"a":1}')
    assert accepts(grammar, '{"a": 1}')
    assert accepts(grammar, '{\n  "a": 1\n}')
    assert not accepts(grammar, '{\n\n"a": 1}')
    assert not accepts(grammar, f'{{{" " * 50}"a": 1}}')


def test_a_client_cannot_loosen_the_grammar() -> None:
    grammar = enforced({"x-guidance": {"lenient": True}, "type": "integer"})
    assert not accepts(grammar, '"a"')


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2024-02-29", ["2023-02-29", "2100-02-29", "0000-01-01", "2024-13-01"]),
        ("date-time", "2024-02-29T10:00:00Z", ["2023-02-29T10:00:00Z", "2024-01-01T10:00:60Z"]),
        ("time", "10:00:59+01:00", ["10:00:60Z", "10:00"]),
        ("email", "a.b@c.org", ["a@b@c", "x" * 65 + "@c.org"]),
        ("hostname", "a-b.example.org", ["xn--x.org", "a" * 64, "a..b"]),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", ["123e4567"]),
    ],
)
def test_formats_are_enforced_as_readers_read_them(name: str, good: str, bad: list[str]) -> None:
    grammar = enforced({"type": "string", "format": name})
    assert accepts(grammar, f'"{good}"')
    assert not [text for text in bad if accepts(grammar, f'"{text}"')]


def test_a_format_does_not_open_the_object_around_it() -> None:
    schema = {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}}
    assert prepare(schema)["additionalProperties"] is False


KEYWORDS = (
    *("$ref", "$defs", "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "allOf", "anyOf", "oneOf", "not", "if", "then"),
    *("minLength", "maxLength", "pattern", "format", "minimum", "maximum", "multipleOf", "minProperties", "x"),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["#", "#/$defs/x", "object", "array", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=1500, deadline=None)
@given(VALUES)
def test_whatever_a_client_sends_is_a_schema_or_a_refusal(value: Any) -> None:
    with suppress(SchemaError):
        assert isinstance(prepare(value), dict)
