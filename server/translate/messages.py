"""Chat messages on the wire → messages for the template → a prompt in tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence

from server.errors import InvalidRequest, NotSupported
from server.plan import ModelText
from server.protocol.chat import ChatMessage, ContentPart, TemplateFields
from server.protocol.common import JsonObject
from server.text.chat_template import ChatTemplate, ChatTemplateError

_TEMPLATE_CHARS = 1 << 20  # a template that came with the request may take long, whatever it is given


def num_message_chars(body: TemplateFields) -> int:
    """About how much text the messages hold."""
    texts = 0 if body.chat_template is None else _TEMPLATE_CHARS
    for message in body.messages or ():
        content = message.content
        texts += len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content or ())
    return texts


def prompt_tokens(body: TemplateFields, model: ModelText, *, add_special_tokens: bool) -> list[int]:
    """The rendered messages in tokens. The template writes BOS itself. Raises InvalidRequest."""
    try:
        return model.tokenizer.encode(render(body, model), add_special_tokens)
    except ValueError as error:
        raise InvalidRequest(f"messages: {error}", param="messages") from error


def render(body: TemplateFields, model: ModelText) -> str:
    """The text that the template makes of the messages. Raises InvalidRequest."""
    if body.tools:
        raise NotSupported("tools: this server does not call tools", param="tools")
    template = _template(body, model)
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    continues = bool(body.continue_final_message)
    try:
        return template.render(
            _template_messages(body.messages, keeps_developer=_knows_developer(template)),
            documents=body.documents,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            template_kwargs={**effort, **(body.chat_template_kwargs or {})},
        )
    except ChatTemplateError as error:
        raise InvalidRequest(f"messages: {error}", param="messages") from error


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
    return [
        _template_message(message, roles.get(message.role, message.role), f"messages[{index}]")
        for index, message in enumerate(messages)
    ]


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
        result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
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


def _tool_call(call: JsonObject) -> JsonObject:
    """Templates want a call's arguments as an object; on the wire they are a JSON string."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
