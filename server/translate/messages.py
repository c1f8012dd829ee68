"""Chat messages on the wire → messages for the template → a prompt in tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from server.errors import InvalidRequest, NotSupported
from server.plan import ModelText
from server.protocol.chat import ChatMessage, ContentPart, TemplateFields
from server.protocol.common import JsonObject
from server.structured.call_formats import CallFormat
from server.text.chat_template import ChatTemplate, ChatTemplateError
from server.translate.tool_messages import as_text, with_short_ids
from server.translate.tools import ToolUse, call_format, tool_use

_TEMPLATE_CHARS = 1 << 20  # a template that came with the request may take long, whatever it is given


def num_message_chars(body: TemplateFields) -> int:
    """About how much text the messages hold."""
    texts = 0 if body.chat_template is None else _TEMPLATE_CHARS
    for message in body.messages or ():
        content = message.content
        texts += len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content or ())
    return texts + num_json_chars(body.tools)


def num_json_chars(value: object) -> int:
    """How long a JSON value is, written out. Raises InvalidRequest for one that is nested too deep to be written."""
    if value is None or isinstance(value, str):
        return len(value or "")
    try:
        return len(orjson.dumps(value))
    except TypeError as error:
        raise InvalidRequest(f"The body holds a value that is nested too deep: {error}") from error


def prompt_tokens(body: TemplateFields, model: ModelText, *, add_special_tokens: bool) -> list[int]:
    """The rendered messages in tokens. The template writes BOS itself. Raises InvalidRequest."""
    return encode_prompt(render(body, model).text, model, add_special_tokens=add_special_tokens)


def encode_prompt(text: str, model: ModelText, *, add_special_tokens: bool) -> list[int]:
    """Raises InvalidRequest."""
    try:
        return model.tokenizer.encode(text, add_special_tokens)
    except ValueError as error:
        raise InvalidRequest(f"messages: {error}", param="messages") from error


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and what it was made of."""

    text: str
    template: ChatTemplate
    tools: ToolUse
    calls: CallFormat  # how the model writes calls


def render(body: TemplateFields, model: ModelText) -> Rendered:
    """What the template makes of messages and tools. Raises InvalidRequest."""
    use = tool_use(body)
    template = _template(body, model)
    calls = call_format(template, use)
    messages = _template_messages(body.messages, keeps_developer=_knows_developer(template))
    if not calls.in_template:
        messages = as_text(messages, calls, use.told)
    elif calls.id_chars is not None:
        messages = with_short_ids(messages, calls.id_chars)
    tools = [{"type": "function", "function": function} for function in use.told]
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    continues = bool(body.continue_final_message)
    try:
        text = template.render(
            messages,
            tools=tools if tools and calls.in_template else None,
            documents=body.documents,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            template_kwargs={**effort, **(body.chat_template_kwargs or {})},
        )
    except ChatTemplateError as error:
        raise InvalidRequest(f"messages: {error}", param="messages") from error
    return Rendered(text, template, use, calls)


def _template(body: TemplateFields, model: ModelText) -> ChatTemplate:
    if body.chat_template is not None:
        if not model.settings.trust_request_chat_template:
            raise NotSupported(
                "chat_template: this server uses the model's own; its operator can allow others with "
                "--trust-request-chat-template",
                param="chat_template",
            )
        try:
            return model.own_template(body.chat_template)
        except ChatTemplateError as error:
            raise InvalidRequest(f"chat_template: {error}", param="chat_template") from error
    if model.chat_template is None:
        raise NotSupported(
            "messages: this model has no chat template. Use /v1/completions, or start the server with --chat-template",
            param="messages",
        )
    return model.chat_template


def _knows_developer(template: ChatTemplate) -> bool:
    return any("developer" in source for source in template.sources.values())


def _template_messages(messages: Sequence[ChatMessage], *, keeps_developer: bool) -> list[JsonObject]:
    roles = {"function": "tool"} if keeps_developer else {"function": "tool", "developer": "system"}
    result: list[JsonObject] = []
    called: dict[str, str] = {}  # names of functions, by the ids of their calls
    for index, message in enumerate(messages):
        told = _template_message(message, roles.get(message.role, message.role), f"messages[{index}]")
        called |= {call["id"]: call["function"]["name"] for call in told.get("tool_calls", ())}
        if "name" not in told and (name := called.get(told.get("tool_call_id", ""))):
            told["name"] = name  # clients leave it out, and some templates insist on it
        result.append(told)
    return result


def _template_message(message: ChatMessage, role: str, where: str) -> JsonObject:
    if message.audio is not None:
        raise NotSupported(f"{where}.audio: this model reads text only", param=f"{where}.audio")
    content = _text(message, f"{where}.content")
    if content is None and not (role == "assistant" and (message.tool_calls or message.function_call)):
        raise InvalidRequest(f"{where}.content: a text is required", param=f"{where}.content")
    result: JsonObject = {"role": role, "content": content or ""}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in calls]
    elif message.function_call is not None:  # the older form of one call
        call = {"id": "call_0", "type": "function", "function": message.function_call}
        result["tool_calls"] = [_tool_call(call, f"{where}.function_call")]
    if message.role == "function":
        result["tool_call_id"] = "call_0"
    for key in ("reasoning_content", "reasoning", "thinking"):
        if isinstance((value := (message.model_extra or {}).get(key)), str):
            result[key] = value
    return result


def _text(message: ChatMessage, where: str) -> str | None:
    if message.content is None:
        return message.refusal
    if isinstance(message.content, str):
        return message.content
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(message.content))


def _part_text(part: ContentPart, where: str) -> str:
    text = {"text": part.text, "refusal": part.refusal}.get(part.type)
    if part.type not in ("text", "refusal"):
        raise NotSupported(f"{where}: parts of type {part.type[:40]!r} are not supported, only text", param=where)
    if text is None:
        raise InvalidRequest(f"{where}: a part of type {part.type!r} needs its {part.type!r}", param=where)
    return text


def _tool_call(call: JsonObject, where: str) -> JsonObject:
    """Templates want a call's arguments as an object; on the wire they are a JSON string. Raises InvalidRequest."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}: a function with a name is required", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where}: its arguments are not valid JSON", param=where) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}: its arguments must be a JSON object", param=where)
    call_id = call.get("id")
    return {
        "id": call_id if isinstance(call_id, str) else "call_0",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
