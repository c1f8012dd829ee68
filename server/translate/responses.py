"""/v1/responses: request → a chat request → Plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from server.errors import InvalidRequest, NotSupported
from server.generation import Generation
from server.plan import ModelText, Plan
from server.protocol.chat import ChatRequest
from server.protocol.common import JsonObject
from server.protocol.responses import InputFields, InputItem, InputPart, ResponsesRequest
from server.translate.chat import ChatJob
from server.translate.parts import ResponseHead
from server.translate.responses_events import ResponsesWriter, error_event
from server.translate.sampling import SeedSource

_LOGPROBS = "message.output_text.logprobs"
_PARAMS = {"max_completion_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}


@dataclass(frozen=True)
class ResponsesJob:
    """See service.Job."""

    body: ResponsesRequest
    id_prefix: ClassVar[str] = "resp_"
    starts_text: ClassVar[bool] = True

    @property
    def request_id(self) -> str | None:
        return None

    @cached_property
    def _chat(self) -> ChatJob:
        body = self.body
        wants_logprobs = body.top_logprobs is not None or _LOGPROBS in (body.include or ())
        options = {
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "logprobs": wants_logprobs,
            "top_logprobs": body.top_logprobs,
        }
        return ChatJob(ChatRequest.model_validate(chat_fields(body) | options))

    def num_choices(self) -> int:
        return 1

    def num_chars(self) -> int:
        return self._chat.num_chars()

    def plan(self, model: ModelText, draw_seed: SeedSource) -> Plan:
        _check(self.body)
        try:
            return self._chat.plan(model, draw_seed)
        except InvalidRequest as error:
            param = _PARAMS.get(error.param or "", error.param)
            error.param = None if param is None else param.replace(".function.", ".")
            raise

    def text_offsets(self, plan: Plan, model: ModelText) -> list[int]:
        return []

    def writer(self, head: ResponseHead, generation: Generation) -> ResponsesWriter:
        return ResponsesWriter(self.body, head, generation)

    def error_event(self, error: Exception, writer: object) -> bytes:
        return writer.error(error) if isinstance(writer, ResponsesWriter) else error_event(error, 0)


def check_input(body: InputFields) -> None:
    """Raises NotSupported for what the API has and this server does not do."""
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise NotSupported(f"{name}: this server stores nothing; send the whole conversation", param=name)
    if body.truncation not in (None, "disabled"):
        raise NotSupported("truncation: only 'disabled' is supported", param="truncation")
    if body.text is not None and body.text.get("verbosity") not in (None, "medium"):
        raise NotSupported("text.verbosity: only 'medium' is supported", param="text.verbosity")


def _check(body: ResponsesRequest) -> None:
    check_input(body)
    for name in ("prompt", "moderation", "context_management"):
        if getattr(body, name):
            raise NotSupported(f"{name}: not supported by this server", param=name)
    if body.background:
        raise NotSupported("background: this server answers while you wait", param="background")
    if body.service_tier not in (None, "auto", "default"):
        raise NotSupported("service_tier: only 'auto' and 'default' are supported", param="service_tier")
    if body.prompt_cache_retention == "24h":
        raise NotSupported("prompt_cache_retention: the prefix cache lives in memory", param="prompt_cache_retention")
    if unknown := sorted(set(body.include or ()) - {_LOGPROBS}):
        raise NotSupported(f"include: {unknown[0][:100]!r} is not supported, only {_LOGPROBS!r}", param="include")
    if body.stream_options and body.stream_options.get("include_obfuscation"):
        raise NotSupported("stream_options.include_obfuscation: events carry no padding", param="stream_options")


def chat_fields(body: InputFields) -> JsonObject:
    """The conversation as a chat request has it."""
    messages: list[JsonObject] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            _add_item(item, f"input[{index}]", messages)
    if not messages:
        raise InvalidRequest("input: must not be empty", param="input")
    fields: JsonObject = {"messages": messages, "reasoning_effort": (body.reasoning or {}).get("effort")}
    if body.tools or body.tool_choice is not None:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
        fields["tool_choice"] = body.tool_choice
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if body.text is not None and body.text.get("format") is not None:
        fields["response_format"] = _format(body.text["format"])
    return fields


def _tool(tool: JsonObject, where: str) -> JsonObject:
    """Here a function's fields stand beside its type."""
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:40]
        raise NotSupported(f"{where}: tools of type {kind!r} are not supported, only 'function'", param=where)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _format(form: object) -> JsonObject:
    """Here a schema's name and the schema stand beside the type."""
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise NotSupported("text.format: only text, json_object and json_schema are supported", param="text.format")
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


def _add_item(item: InputItem, where: str, messages: list[JsonObject]) -> None:
    """Calls belong to the answer that they came with, or to an answer of their own."""
    if item.type == "reasoning":
        return
    if item.type == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(_call(item, where))
        return
    messages.append(_result(item, where) if item.type == "function_call_output" else _message(item, where))


def _call(item: InputItem, where: str) -> JsonObject:
    if item.call_id is None or item.name is None or item.arguments is None:
        raise InvalidRequest(f"{where}: a function_call needs call_id, name and arguments", param=where)
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _result(item: InputItem, where: str) -> JsonObject:
    if item.call_id is None or item.output is None:
        raise InvalidRequest(f"{where}: a function_call_output needs call_id and output", param=where)
    content = item.output if isinstance(item.output, str) else _text(item.output, where)
    return {"role": "tool", "tool_call_id": item.call_id, "content": content}


def _message(item: InputItem, where: str) -> JsonObject:
    if item.type not in (None, "message"):
        raise NotSupported(f"{where}: items of type {item.type[:40]!r} are not supported", param=where)
    if item.role is None or item.content is None:
        raise InvalidRequest(f"{where}: a message needs a role and a content", param=where)
    content = item.content if isinstance(item.content, str) else _text(item.content, where)
    return {"role": item.role, "content": content}


def _text(parts: Sequence[InputPart], where: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        if part.type not in ("input_text", "output_text", "text", "refusal"):
            raise NotSupported(
                f"{where}.content[{index}]: parts of type {part.type[:40]!r} are not supported, only text", param=where
            )
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise InvalidRequest(f"{where}.content[{index}]: a text is required", param=where)
        texts.append(text)
    return "\n".join(texts)
