"""Conversations with tool calls, for templates that cannot write them: everything becomes text."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from server.protocol.common import JsonObject
from server.structured.call_formats import CallFormat, instructions, tool_response


def as_text(messages: Sequence[JsonObject], calls: CallFormat, told: Sequence[JsonObject]) -> list[JsonObject]:
    """The messages for a template with the roles system, user and assistant alone: the tools in the system message,
    calls in the model's own answers, results, those of one turn together, in a message of the user."""
    result: list[JsonObject] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(tool_response(str(message["content"])))
            continue
        _flush(results, result)
        result.append(_written(message, calls) if message.get("tool_calls") else message)
    _flush(results, result)
    return _instructed(result, instructions(calls, told)) if told else result


def _flush(results: list[str], messages: list[JsonObject]) -> None:
    if results:
        messages.append({"role": "user", "content": "\n".join(results)})
        results.clear()


def _written(message: JsonObject, calls: CallFormat) -> JsonObject:
    functions = [call["function"] for call in message["tool_calls"]]
    written = calls.write([(function["name"], function["arguments"]) for function in functions])
    text = f"{message['content']}\n{written}" if message["content"] else written
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}


def _instructed(messages: list[JsonObject], text: str) -> list[JsonObject]:
    if messages and messages[0]["role"] in ("system", "developer"):
        first = messages[0]
        return [first | {"content": f"{first['content']}\n\n{text}" if first["content"] else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_short_ids(messages: Sequence[JsonObject], num_chars: int) -> list[JsonObject]:
    """The same with every id of a call made of so many letters and digits, which some templates insist on."""
    return [_with_short_ids(message, num_chars) for message in messages]


def _with_short_ids(message: JsonObject, num_chars: int) -> JsonObject:
    changed: dict[str, Any] = {}
    if message.get("tool_calls"):
        changed["tool_calls"] = [call | {"id": _short_id(call["id"], num_chars)} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"], num_chars)
    return message | changed


def _short_id(text: str, num_chars: int) -> str:
    if len(text) == num_chars and text.isascii() and text.isalnum():
        return text
    return sha256(text.encode("utf-8", "replace")).hexdigest()[:num_chars]
