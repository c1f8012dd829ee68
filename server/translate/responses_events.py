"""/v1/responses: parts and answers → named events with rising numbers, and the response object."""

from __future__ import annotations

import time
from collections.abc import Sequence

import orjson

from server.errors import to_wire
from server.generation import Answer, Generation, Part
from server.protocol.common import JsonObject
from server.protocol.responses import ResponsesRequest
from server.sse import named_frame
from server.text.output import LogprobEntry
from server.translate.parts import ResponseHead, Timings, chat_logprobs


class ResponsesWriter:
    """The response of one request, whole or as events."""

    def __init__(self, body: ResponsesRequest, head: ResponseHead, generation: Generation) -> None:
        self._body = body
        self._head = head
        self._generation = generation
        self._item_id = head.id.replace("resp_", "msg_", 1)
        self._number = 0  # of the next event
        self._opened = False
        self._told = Answer("", [], [], "length")  # what the events so far add up to
        item = orjson.dumps(self._item_id)
        self._delta = b'{"type":"response.output_text.delta","item_id":%b,"output_index":0,"content_index":0' % item

    # Events

    def part(self, part: Part) -> bytes:
        opening = b"" if self._opened else self._opening()
        told = self._told
        told.text += part.text
        told.logprobs += part.logprobs
        told.finish = part.finish or told.finish
        if not part.text and not part.logprobs:
            return opening
        logprobs = orjson.dumps(self._logprobs(part.logprobs)) if part.logprobs else b"[]"
        fields = (self._delta, orjson.dumps(part.text), logprobs, self._next_number())
        return opening + named_frame(
            "response.output_text.delta", b'%b,"delta":%b,"logprobs":%b,"sequence_number":%d}' % fields
        )

    def _opening(self) -> bytes:
        self._opened = True
        started = self._response("in_progress", None, [])
        item = self._item("in_progress", [])
        return (
            self._event("response.created", response=started)
            + self._event("response.in_progress", response=started)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._where(), part=self._text("", ()))
        )

    def closing(self, timings: Timings) -> bytes:
        told = self._told
        status = _status(told)
        text = self._text(told.text, told.logprobs)
        item = self._item(status, [text])
        done = {"text": told.text, "logprobs": text["logprobs"]}
        return (
            self._event("response.output_text.done", **self._where(), **done)
            + self._event("response.content_part.done", **self._where(), part=text)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{status}", response=self._response(status, told, [item]))
        )

    def error(self, error: Exception) -> bytes:
        """The event that tells of an error; no other follows it."""
        return error_event(error, self._next_number())

    def _where(self) -> JsonObject:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: object) -> bytes:
        return named_frame(kind, orjson.dumps({"type": kind, **fields, "sequence_number": self._next_number()}))

    def _next_number(self) -> int:
        self._number += 1
        return self._number - 1

    # The whole

    def response(self, answers: Sequence[Answer], timings: Timings) -> bytes:
        answer = answers[0]
        status = _status(answer)
        item = self._item(status, [self._text(answer.text, answer.logprobs)])
        return orjson.dumps(self._response(status, answer, [item]))

    def _item(self, status: str, content: list[JsonObject]) -> JsonObject:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _text(self, text: str, entries: Sequence[LogprobEntry]) -> JsonObject:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(entries)}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> list[JsonObject]:
        content: list[JsonObject] = chat_logprobs(entries, self._body.top_logprobs or 0)["content"]
        return content

    def _response(self, status: str, answer: Answer | None, output: list[JsonObject]) -> JsonObject:
        """`answer` None: it has only begun."""
        body, sampling = self._body, self._generation.plan.sampling
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._head.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if answer is None else self._usage(),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> JsonObject:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _status(answer: Answer) -> str:
    return "completed" if answer.finish == "stop" else "incomplete"


def error_event(error: Exception, number: int) -> bytes:
    """The event number `number`, which tells of an error."""
    detail = to_wire(error).body["error"]
    fields = {name: detail[name] for name in ("code", "message", "param")}
    return named_frame("error", orjson.dumps({"type": "error", **fields, "sequence_number": number}))
