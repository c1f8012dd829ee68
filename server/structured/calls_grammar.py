"""Tool calls as a grammar: which functions, how many calls, in the model's own format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from server.protocol.common import JsonObject
from server.structured.call_formats import CallFormat, python_literal
from server.structured.grammar import WHITESPACE, GrammarBuilder, quoted

MAX_CALLS: Final = 32  # in one answer: a weak model would go on for ever
_DEFINITIONS: Final = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called; `parameters` is a prepared schema of an object."""

    name: str
    parameters: JsonObject
    param: str = "tools"  # the field of the request that the parameters come from


@dataclass(frozen=True, slots=True)
class CallRules:
    """What an answer may or must call. `text` is a rule for the answers without a call, None: any text."""

    functions: Sequence[Function]
    required: bool
    parallel: bool
    text: str | None = None


def calls_rule(builder: GrammarBuilder, calls: CallFormat, rules: CallRules) -> str:
    """A rule's body: answers with calls and, unless they are required, without."""
    named = builder.rule("named", " | ".join(_named(builder, calls, rules.functions)))
    following = builder.literal(calls.between + calls.before_name)
    more = f"({following} {named}){{0,{MAX_CALLS - 1}}}" if rules.parallel else ""
    rest = " ".join(part for part in (named, more, builder.literal(calls.end)) if part)
    opening = calls.begin + calls.before_name
    optional = f"({builder.literal(calls.optional_begin)})? " if builder.is_token(calls.optional_begin) else ""
    at_once = f"{optional}{builder.literal(opening)} {rest}"
    if rules.required:
        return at_once
    if rules.text is not None:
        return f"{rules.text} | {at_once}"
    if not calls.after_text:
        first = re.escape(calls.trigger[0])
        builder.rule("PLAIN", rf"/\s*[^{first}\s](?s:.*)/")
        return f"PLAIN? | {at_once}"
    head = builder.until("head", calls.trigger)
    return f"TEXT | {head} {builder.literal(opening[len(calls.trigger) :])} {rest}"


def _named(builder: GrammarBuilder, calls: CallFormat, functions: Sequence[Function]) -> list[str]:
    """For each function: its name, its arguments, and what comes after them."""
    rules = []
    for index, function in enumerate(functions):
        python = calls.arguments == "python"
        values = _keywords(builder, f"call_{index}", function) if python else builder.schema(function.parameters)
        parts = (
            builder.literal(function.name + calls.before_arguments),
            values,
            builder.literal(calls.after_arguments),
        )
        rules.append(builder.rule(f"call_{index}", " ".join(part for part in parts if part)))
    return rules


def _keywords(builder: GrammarBuilder, name: str, function: Function) -> str:
    """Keyword arguments in the order of the properties; a rule with a comma before each argument, and one without
    for as long as none has come."""
    schema = function.parameters
    shared: JsonObject = {key: schema[key] for key in _DEFINITIONS if key in schema}
    required = set(schema.get("required", ()))
    started = unstarted = ""
    for index, (key, sub) in reversed(list(enumerate(schema.get("properties", {}).items()))):
        value = builder.rule(f"{name}_{index}", f"{quoted(key + '=')} ({_value(builder, sub, shared)})")
        more = builder.rule(f"{name}_{index}_more", f'", " {value} {started}')
        first = builder.rule(f"{name}_{index}_first", f"{value} {started}")
        if key in required:
            started, unstarted = more, first
        else:
            started = f"({' | '.join(filter(None, (more, started)))}){'' if started else '?'}"
            unstarted = f"({' | '.join(filter(None, (first, unstarted)))}){'' if unstarted else '?'}"
        started = builder.rule(f"{name}_{index}_after", started)
        unstarted = builder.rule(f"{name}_{index}_open", unstarted)
    return unstarted


def _value(builder: GrammarBuilder, schema: JsonObject | bool, shared: JsonObject) -> str:
    """A rule's body: values as Python writes them, at least on the first level."""
    if isinstance(schema, bool):
        return builder.schema({}) if schema else builder.schema({"enum": []})
    if "anyOf" in schema and not {"type", "properties", "enum", "const", "allOf", "$ref"} & schema.keys():
        return " | ".join(f"({_value(builder, sub, shared)})" for sub in schema["anyOf"])
    kinds = schema.get("type")
    if isinstance(kinds, list) and "enum" not in schema and kinds:
        return " | ".join(f"({_value(builder, schema | {'type': kind}, shared)})" for kind in kinds)
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    if options is None and kinds == "boolean":
        options = [True, False]
    if options is None and kinds == "null":
        options = [None]
    if options and all(option is None or isinstance(option, bool) for option in options):
        return " | ".join(quoted(python_literal(option)) for option in options)
    return builder.schema(shared | schema, WHITESPACE)
