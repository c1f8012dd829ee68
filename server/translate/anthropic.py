"""Anthropic's /v1/messages: request → a chat request → Plan; parts and answers → events and message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import orjson

from server.errors import InvalidRequest, NotSupported, WireError, to_wire
from server.generation import Answer, Generation, Part
from server.plan import ModelText, Plan
from server.protocol.anthropic import Block, CountTokensRequest, MessagesRequest
from server.protocol.chat import ChatRequest
from server.protocol.common import JsonObject
from server.sse import named_frame
from server.translate.chat import ChatJob
from server.translate.parts import ResponseHead, Timings
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
            error.param = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}.get(
                error.param or "", error.param
            )
            raise

    def text_offsets(self, plan: Plan, model: ModelText) -> list[int]:
        return []

    def writer(self, head: ResponseHead, generation: Generation) -> MessagesWriter:
        return MessagesWriter(head, generation)

    def error_event(self, error: Exception, writer: object) -> bytes:
        return named_frame("error", anthropic_error(to_wire(error)).json())


def check_messages(body: CountTokensRequest) -> None:
    """Raises NotSupported for what the API has and this server does not do."""
    if body.tools:
        raise NotSupported("tools: this server does not call tools", param="tools")
    if body.tool_choice is not None and body.tool_choice.get("type") not in ("auto", "none"):
        raise NotSupported("tool_choice: this server does not call tools", param="tool_choice")
    if body.thinking is not None and body.thinking.get("type") != "disabled":
        raise NotSupported("thinking: only {'type': 'disabled'} is supported", param="thinking")


def chat_fields(body: CountTokensRequest) -> JsonObject:
    """The conversation as a chat request has it. A last message of the assistant is a beginning to go on from."""
    messages: list[JsonObject] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages.append({"role": message.role, "content": _text(message.content, f"messages[{index}].content")})
    return {"messages": messages, "continue_final_message": body.messages[-1].role == "assistant"}


def _text(content: str | Sequence[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        if block.type != "text":
            raise NotSupported(
                f"{where}[{index}]: blocks of type {block.type[:40]!r} are not supported, only text", param=where
            )
        if block.text is None:
            raise InvalidRequest(f"{where}[{index}]: a text block needs its text", param=where)
        texts.append(block.text)
    return "\n".join(texts)


def anthropic_error(wire: WireError) -> WireError:
    """An error in this API's shape, which keeps the other API's keys beside its own."""
    detail = wire.body["error"] | {"type": _ERROR_TYPES.get(wire.status, "api_error")}
    return WireError(wire.status, {"type": "error", "error": detail}, wire.headers)


class MessagesWriter:
    """The message of one request, whole or as events."""

    def __init__(self, head: ResponseHead, generation: Generation) -> None:
        self._head = head
        self._generation = generation
        self._opened = False
        self._end: Part | None = None

    def part(self, part: Part) -> bytes:
        opening = b"" if self._opened else self._opening()
        if part.finish is not None:
            self._end = part
        if not part.text:
            return opening
        text = orjson.dumps(part.text)
        return opening + (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":' + text + b"}}\n\n"
        )

    def _opening(self) -> bytes:
        self._opened = True
        block: JsonObject = {"type": "text", "text": ""}
        message = self._message([], None, None)
        return (
            _event({"type": "message_start", "message": message})
            + _event({"type": "content_block_start", "index": 0, "content_block": block})
            + _event({"type": "ping"})
        )

    def closing(self, timings: Timings) -> bytes:
        end = self._end
        stop = None if end is None else end.stop
        delta = {"stop_reason": _stop_reason(None if end is None else end.finish, stop), "stop_sequence": stop}
        return (
            _event({"type": "content_block_stop", "index": 0})
            + _event({"type": "message_delta", "delta": delta, "usage": self._usage()})
            + _event({"type": "message_stop"})
        )

    def response(self, answers: Sequence[Answer], timings: Timings) -> bytes:
        answer = answers[0]
        content = [{"type": "text", "text": answer.text}]
        return orjson.dumps(self._message(content, _stop_reason(answer.finish, answer.stop), answer.stop))

    def _message(self, content: list[JsonObject], stop_reason: str | None, stop_sequence: str | None) -> JsonObject:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> JsonObject:
        """In this API input_tokens are those that the cache did not have."""
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
        }


def _stop_reason(finish: str | None, stop: str | None) -> str:
    if finish == "length":
        return "max_tokens"
    return "end_turn" if stop is None else "stop_sequence"


def _event(data: JsonObject) -> bytes:
    return named_frame(data["type"], orjson.dumps(data))
