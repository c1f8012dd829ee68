"""Anthropic's /v1/messages: request → a chat request → Plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import orjson

from server.errors import InvalidRequest, NotSupported, WireError, to_wire
from server.generation import Generation
from server.plan import ModelText, Plan
from server.protocol.anthropic import Block, CountTokensRequest, InputMessage, MessagesRequest
from server.protocol.chat import ChatRequest
from server.protocol.common import JsonObject
from server.sse import named_frame
from server.translate.anthropic_events import MessagesWriter
from server.translate.chat import ChatJob
from server.translate.parts import ResponseHead
from server.translate.sampling import SeedSource

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True)
class MessagesJob:
    """See service.Job."""

    body: MessagesRequest
    id_prefix: ClassVar[str] = "msg_"
    starts_text: ClassVar[bool] = True

    @property
    def request_id(self) -> str | None:
        return None

    @cached_property
    def _chat(self) -> ChatJob:
        body = self.body
        return ChatJob(
            ChatRequest.model_validate(
                chat_fields(body)
                | {
                    "max_completion_tokens": body.max_tokens,
                    "temperature": body.temperature,
                    "top_p": body.top_p,
                    "top_k": body.top_k,
                    "stop": body.stop_sequences,
                }
            )
        )

    def num_choices(self) -> int:
        return 1

    def num_chars(self) -> int:
        return self._chat.num_chars()

    def plan(self, model: ModelText, draw_seed: SeedSource) -> Plan:
        check_messages(self.body)
        try:
            return self._chat.plan(model, draw_seed)
        except InvalidRequest as error:
            param = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}.get(
                error.param or "", error.param
            )
            error.param = None if param is None else _own_name(param)
            raise

    def text_offsets(self, plan: Plan, model: ModelText) -> list[int]:
        return []

    def writer(self, head: ResponseHead, generation: Generation) -> MessagesWriter:
        return MessagesWriter(head, generation)

    def error_event(self, error: Exception, writer: object) -> bytes:
        return named_frame("error", anthropic_error(to_wire(error)).json())


def _own_name(param: str) -> str:
    """A field of a tool by the name that it has in this API."""
    return param.replace(".function.parameters", ".input_schema").replace(".function", "")


def check_messages(body: CountTokensRequest) -> None:
    """Raises NotSupported for what the API has and this server does not do."""
    if body.thinking is not None and body.thinking.get("type") != "disabled":
        raise NotSupported("thinking: only {'type': 'disabled'} is supported", param="thinking")


def chat_fields(body: CountTokensRequest) -> JsonObject:
    """The conversation as a chat request has it. A last message of the assistant is a beginning to go on from."""
    messages: list[JsonObject] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}].content")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    return {"messages": messages, "continue_final_message": body.messages[-1].role == "assistant"} | (
        {"tools": tools} | _choice(body.tool_choice or {}) if tools or body.tool_choice else {}
    )


def _messages(message: InputMessage, where: str) -> list[JsonObject]:
    """One message as chat has it: results of tools are messages of their own, before what else the user says."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [_result(block, where) for block in message.content if block.type == "tool_result"]
    calls = [_call(block, where) for block in message.content if block.type == "tool_use"]
    kept = [block for block in message.content if block.type not in ("tool_result", "tool_use", "thinking")]
    if not kept and results:
        return results
    content = _text(kept, where)
    return [*results, {"role": message.role, "content": content} | ({"tool_calls": calls} if calls else {})]


def _call(block: Block, where: str) -> JsonObject:
    if block.id is None or block.name is None or block.input is None:
        raise InvalidRequest(f"{where}: a tool_use block needs id, name and input", param=where)
    arguments = orjson.dumps(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _result(block: Block, where: str) -> JsonObject:
    if block.tool_use_id is None:
        raise InvalidRequest(f"{where}: a tool_result block needs its tool_use_id", param=where)
    content = block.content or ""
    if not isinstance(content, str):
        content = _text([Block.model_validate(part) for part in content], where)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _tool(tool: JsonObject, where: str) -> JsonObject:
    if tool.get("type") not in (None, "custom"):
        kind = str(tool["type"])[:40]
        raise NotSupported(f"{where}: tools of type {kind!r} are not supported, only those of the client", param=where)
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(choice: JsonObject) -> JsonObject:
    kinds: dict[object, str | JsonObject] = {
        None: "auto",
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "function": {"name": choice.get("name")}},
    }
    if (kind := choice.get("type")) not in kinds:
        raise NotSupported(f"tool_choice: type {str(kind)[:40]!r} is not supported", param="tool_choice")
    return {"tool_choice": kinds[kind], "parallel_tool_calls": not choice.get("disable_parallel_tool_use")}


def _text(content: str | Sequence[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        if block.type != "text":
            raise NotSupported(f"{where}[{index}]: blocks of type {block.type[:40]!r} are not supported", param=where)
        if block.text is None:
            raise InvalidRequest(f"{where}[{index}]: a text block needs its text", param=where)
        texts.append(block.text)
    return "\n".join(texts)


def anthropic_error(wire: WireError) -> WireError:
    """An error in this API's shape, which keeps the other API's keys beside its own."""
    detail = wire.body["error"] | {"type": _ERROR_TYPES.get(wire.status, "api_error")}
    return WireError(wire.status, {"type": "error", "error": detail}, wire.headers)
