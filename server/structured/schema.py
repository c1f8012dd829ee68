"""JSON schemas as clients send them → schemas that the grammar enforces in full, or a refusal that names what it can't.

The grammar (llguidance) knows most of draft 2020-12. Here the rest is refused with its place, formats that say nothing
about the value are dropped, and a schema that no finite value fulfils is found before a model writes one without end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from server.protocol.common import JsonObject
from server.structured.string_formats import settle_format

MAX_DEPTH: Final = 90  # levels of JSON; the grammar's own reader ends at 128
MAX_REFS: Final = 1000  # distinct targets of $ref
_MAX_NAME: Final = 60  # characters of a client's word in a message

# Keywords that constrain a value in ways that the grammar cannot.
_UNENFORCEABLE: Final = frozenset(
    {
        "not",
        "contains",
        "uniqueItems",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_CONDITION: Final = ("if", "then", "else")
# What some of them say when they say nothing.
_EMPTY: Final[Mapping[str, tuple[object, ...]]] = {
    "uniqueItems": (False,),
    "contains": (),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
}
_LEFT_OUT: Final = frozenset({"x-guidance", "minContains", "maxContains", *_CONDITION, *_UNENFORCEABLE})

_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLES: Final = ("additionalProperties", "additionalItems")
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Keywords that constrain a value by what it holds.
_CONSTRAINING: Final = (
    *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
)


class SchemaError(ValueError):
    """A schema that cannot be enforced; the message names the keyword and its place, fit for the client."""


def prepare(schema: object) -> JsonObject:
    """The schema as the grammar enforces it: a copy, without what constrains nothing. Raises SchemaError."""
    prepared = _copy(schema, "#", 0)
    if prepared is False:
        raise SchemaError("#: the schema allows no value at all")
    root: JsonObject = {} if prepared is True else prepared
    _check_finite(root)
    return root if _intersects(root) else _closed(root)


def _copy(schema: object, at: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise SchemaError(f"{_short(at)}: nested more than {MAX_DEPTH} levels deep")
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise SchemaError(f"{_short(at)}: a schema is an object or a boolean, not {type(schema).__name__}")
    _check_types(schema, at)
    _refuse(schema, at)
    result: JsonObject = {}
    for key, value in schema.items():
        if key in _LEFT_OUT:
            continue
        where = f"{at}/{key}"
        if key in _MAPS:
            result[key] = {name: _copy(sub, f"{where}/{name}", depth + 2) for name, sub in _mapping(value, where)}
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            result[key] = [_copy(sub, f"{where}/{index}", depth + 2) for index, sub in enumerate(_list(value, where))]
        elif key in _SINGLES or key == "items":
            result[key] = _copy(value, where, depth + 1)
        elif key in _COUNTS and isinstance(value, float) and value.is_integer():
            result[key] = int(value)
        else:
            result[key] = value
    try:
        settle_format(result)
    except ValueError as error:
        raise SchemaError(f"{_short(at)}: {error}") from error
    return result


def _mapping(value: object, at: str) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict):
        raise SchemaError(f"{_short(at)}: must be an object of schemas")
    return iter(value.items())


def _list(value: object, at: str) -> list[object]:
    if not isinstance(value, list):
        raise SchemaError(f"{_short(at)}: must be a list of schemas")
    return value


def _check_types(schema: JsonObject, at: str) -> None:
    """Raises SchemaError for a keyword whose value is none that it can have."""
    for key, value in schema.items():
        if key in _COUNTS:
            fits = isinstance(value, (int, float)) and value >= 0 and float(value).is_integer()
        elif key in _NUMBERS:
            fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        elif key in ("$ref", "pattern", "format"):
            fits = isinstance(value, str)
        elif key == "required":
            fits = isinstance(value, list) and all(isinstance(name, str) for name in value)
        else:
            fits = key != "enum" or isinstance(value, list)
        if not fits:
            raise SchemaError(f"{_short(at)}: {key!r} has a value that it cannot have")


def _refuse(schema: JsonObject, at: str) -> None:
    """Raises SchemaError for a keyword that the grammar cannot enforce."""
    for key in schema:
        if key in _UNENFORCEABLE and schema[key] not in _EMPTY.get(key, ()):
            raise SchemaError(f"{_short(at)}: {key!r} cannot be enforced")
    if "if" in schema and ("then" in schema or "else" in schema):
        raise SchemaError(f"{_short(at)}: 'if' cannot be enforced; write 'anyOf' with one schema for each case")
    ref = schema.get("$ref", "")
    if "://" in ref or ref.startswith("/"):
        raise SchemaError(f"{_short(at)}: '$ref' {_short(ref)!r}: only references within the schema can be followed")
    least, required = schema.get("minProperties", 0), schema.get("required") or ()
    if least > max(1, len(required)):
        # Names of a map may come twice in the text and count once in the value.
        raise SchemaError(f"{_short(at)}: 'minProperties' above 1 cannot be enforced beyond the required properties")


def _short(text: str) -> str:
    return text if len(text) <= 2 * _MAX_NAME else f"{text[:_MAX_NAME]}…{text[-_MAX_NAME:]}"


# Objects without more


def _intersects(schema: object) -> bool:
    """Whether anywhere two schemas hold for one value: then none of their objects may be closed."""
    if not isinstance(schema, dict):
        return False
    applied = [key for key in ("$ref", "allOf", "anyOf", "oneOf") if key in schema]
    others = [key for key in _CONSTRAINING if key in schema]
    together = [sub for sub in schema.get("allOf", ()) if not isinstance(sub, dict) or sub.keys() - {"pattern"}]
    if applied and (len(applied) > 1 or others or len(together) > 1):
        return True
    return any(_intersects(sub) for sub in _children(schema))


def _closed(schema: Any) -> Any:
    """The schema in which an object that lists its properties, and says nothing of others, has no others: a small model
    would go on inventing some."""
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key in _MAPS:
        if key in schema:
            result[key] = {name: _closed(sub) for name, sub in schema[key].items()}
    for key in (*_LISTS, "items"):
        if isinstance(schema.get(key), list):
            result[key] = [_closed(sub) for sub in schema[key]]
    for key in (*_SINGLES, "items"):
        if isinstance(schema.get(key), dict):
            result[key] = _closed(schema[key])
    names = schema.get("properties")
    silent = not {"additionalProperties", "patternProperties"} & schema.keys()
    if names and silent and all(name in names for name in schema.get("required", ())):
        result["additionalProperties"] = False
    return result


# Values without end


def _check_finite(root: JsonObject) -> None:
    """Raises SchemaError if every value of the schema contains another of its own, without end."""
    targets = {ref: target for ref in _refs(root) if (target := _resolve(root, ref)) is not None}
    if len(targets) > MAX_REFS:
        raise SchemaError(f"#: {len(targets)} different targets of '$ref', at most {MAX_REFS} are allowed")
    endless = dict(targets)
    while found := [ref for ref, target in endless.items() if _finite(target, endless)]:
        for ref in found:
            del endless[ref]
    if endless and not _finite(root, endless):
        raise SchemaError(f"#: '$ref' {_short(next(iter(endless)))!r} leads back to itself without end")


def _refs(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"]
        for sub in _children(schema):
            yield from _refs(sub)


def _children(schema: JsonObject) -> Iterator[object]:
    for key in _MAPS:
        yield from schema.get(key, {}).values()
    for key in _LISTS:
        yield from schema.get(key, ())
    items = schema.get("items")
    yield from items if isinstance(items, list) else (items,)
    for key in _SINGLES:
        yield schema.get(key)


def _resolve(root: JsonObject, ref: str) -> object | None:
    """What a JSON pointer within the schema names; None for what is left to the grammar's own resolver."""
    if ref == "#":
        return root
    if not ref.startswith("#/"):
        return None
    found: Any = root
    for part in ref[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found if isinstance(found, dict) else None


def _finite(schema: object, endless: Mapping[str, object]) -> bool:
    """Whether some value of the schema ends, given the references that are not known to."""
    if not isinstance(schema, dict):
        return True
    if schema.get("$ref") in endless or not all(_finite(sub, endless) for sub in schema.get("allOf", ())):
        return False
    if any(schema.get(key) and not any(_finite(s, endless) for s in schema[key]) for key in ("anyOf", "oneOf")):
        return False
    kinds = schema.get("type")
    if kinds == "object" or kinds == ["object"]:
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        others = schema.get("additionalProperties", True)
        return all(_finite(properties.get(name, others), endless) for name in required)
    if kinds == "array" or kinds == ["array"]:
        least = schema.get("minItems", 0)
        first = schema.get("prefixItems", ())
        needed = [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
        return all(_finite(item, endless) for item in needed)
    return True
