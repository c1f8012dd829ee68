"""The tools of a chat request: which functions the model is told of, which it may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from server.errors import InvalidRequest, NotSupported
from server.protocol.chat import ChatRequest, TemplateFields
from server.protocol.common import JsonObject
from server.structured.call_formats import GENERIC, PYTHONIC, CallFormat, format_of_template
from server.structured.calls_grammar import Function
from server.structured.schema import SchemaError, prepare
from server.text.chat_template import ChatTemplate

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEYWORD: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools. Without functions the model is told nothing."""

    functions: tuple[Function, ...] = ()  # that may be called now
    told: tuple[JsonObject, ...] = ()  # `function` of every tool, as the client sent it
    mode: Mode = "none"
    parallel: bool = True
    legacy: bool = False  # asked for by `functions`: one call, answered as `function_call`
    param: str = "tools"


def tool_use(body: TemplateFields) -> ToolUse:
    """Raises InvalidRequest, NotSupported."""
    if not isinstance(body, ChatRequest):
        told = _wire_functions(body.tools or (), "tools")
        return ToolUse(told=tuple(told), mode="auto" if told else "none")
    if body.functions:
        if body.tools:
            raise InvalidRequest("functions: the older form of tools; give one of both", param="functions")
        wire = _checked([(function, f"functions[{index}]") for index, function in enumerate(body.functions)])
        mode, chosen = _choice(body.function_call, list(wire), "function_call")
        return _use(wire, mode, chosen, parallel=False, legacy=True, param="functions")
    if body.function_call not in (None, "none", "auto"):
        raise InvalidRequest("function_call: only with functions", param="function_call")
    told = _wire_functions(body.tools or (), "tools")
    wire = _checked([(function, f"tools[{index}].function") for index, function in enumerate(told)])
    mode, chosen = _choice(body.tool_choice, list(wire), "tool_choice")
    return _use(wire, mode, chosen, parallel=body.parallel_tool_calls is not False, legacy=False, param="tools")


def _use(
    wire: Mapping[str, tuple[JsonObject, Function]],
    mode: Mode,
    chosen: Sequence[str],
    *,
    parallel: bool,
    legacy: bool,
    param: str,
) -> ToolUse:
    if mode == "none":
        return ToolUse(legacy=legacy, param=param)
    return ToolUse(
        tuple(wire[name][1] for name in chosen),
        tuple(function for function, _ in wire.values()),
        mode,
        parallel,
        legacy,
        param,
    )


def _wire_functions(tools: Sequence[JsonObject], param: str) -> list[JsonObject]:
    functions = []
    for index, tool in enumerate(tools):
        where = f"{param}[{index}]"
        if tool.get("type") != "function":
            kind = str(tool.get("type"))[:40]
            raise NotSupported(f"{where}: tools of type {kind!r} are not supported, only 'function'", param=where)
        if not isinstance(tool.get("function"), dict):
            raise InvalidRequest(f"{where}.function: an object is required", param=f"{where}.function")
        functions.append(tool["function"])
    return functions


def _checked(functions: Sequence[tuple[JsonObject, str]]) -> dict[str, tuple[JsonObject, Function]]:
    """Functions by their names, as sent and as enforced. Raises InvalidRequest."""
    found: dict[str, tuple[JsonObject, Function]] = {}
    for function, where in functions:
        name = function.get("name")
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"{where}.name: a name has 1 to 64 letters, digits, underscores or dashes", param=f"{where}.name"
            )
        if name in found:
            raise InvalidRequest(f"{where}.name: {name!r} is declared twice", param=f"{where}.name")
        param = f"{where}.parameters"
        found[name] = (function, Function(name, _parameters(function.get("parameters"), param), param))
    return found


def _parameters(schema: object, where: str) -> JsonObject:
    """The prepared schema of a function's arguments, which are always an object."""
    if schema is None:
        return {"type": "object", "additionalProperties": False}
    try:
        prepared = prepare(schema)
    except SchemaError as error:
        raise NotSupported(f"{where}: {error}", param=where) from error
    kinds = prepared.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise InvalidRequest(f"{where}: arguments are an object, so 'type' must be 'object'", param=where)
    if not prepared.get("properties") and "additionalProperties" not in prepared and not _refers(prepared):
        prepared = prepared | {"additionalProperties": False}  # a function without parameters
    return prepared | {"type": "object"}


def _refers(schema: JsonObject) -> bool:
    return any(key in schema for key in ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "required"))


def _choice(choice: Any, names: Sequence[str], param: str) -> tuple[Mode, Sequence[str]]:
    """(mode, the functions that may be called). Raises InvalidRequest."""
    if choice is None or choice in ("auto", "none"):
        return ("auto" if names and choice != "none" else "none"), names
    if choice == "required":
        return "required", _known(names, names, param)
    if not isinstance(choice, dict):
        raise InvalidRequest(f"{param}: expected none, auto, required or an object that names a function", param=param)
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, names, param)
    if choice.get("type") not in ("function", None):
        raise NotSupported(f"{param}: type {str(choice['type'])[:40]!r} is not supported, only functions", param=param)
    inner = choice.get("function")
    name = inner.get("name") if isinstance(inner, dict) else choice.get("name")
    return "required", _known([name], names, param)


def _allowed(choice: JsonObject, names: Sequence[str], param: str) -> tuple[Mode, Sequence[str]]:
    inner = choice.get("allowed_tools", choice)
    mode = inner.get("mode", "auto") if isinstance(inner, dict) else None
    tools = inner.get("tools") if isinstance(inner, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise InvalidRequest(f"{param}.allowed_tools: needs a mode, auto or required, and tools", param=param)
    wanted = [_allowed_name(tool, f"{param}.allowed_tools.tools[{index}]") for index, tool in enumerate(tools)]
    return mode, _known(wanted, names, param)


def _allowed_name(tool: object, where: str) -> object:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise NotSupported(f"{where}: only tools of type 'function' are supported", param=where)
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, dict) else None


def _known(wanted: Sequence[object], names: Sequence[str], param: str) -> list[str]:
    if not names:
        raise InvalidRequest(f"{param}: only with tools", param=param)
    for name in wanted:
        if name not in names:
            raise InvalidRequest(f"{param}: no function {str(name)[:64]!r} is declared", param=param)
    return list(dict.fromkeys(map(str, wanted)))


def call_format(template: ChatTemplate, use: ToolUse) -> CallFormat:
    """How the model writes calls of these functions."""
    calls = format_of_template(template.sources)
    if calls is PYTHONIC and not all(map(_fits_keywords, use.functions)):
        return GENERIC
    return calls


def _fits_keywords(function: Function) -> bool:
    """Whether the arguments can be written as Python's keyword arguments."""
    schema = function.parameters
    names = schema.get("properties", {})
    closed = not set(schema.get("required", ())) - names.keys() and not any(
        key in schema for key in ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "minProperties")
    )
    return closed and all(_KEYWORD.fullmatch(name) for name in names)
