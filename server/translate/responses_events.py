"""/v1/responses: parts and answers → named events with rising numbers, and the response object."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import orjson

from server.errors import to_wire
from server.generation import Answer, Generation, Part
from server.protocol.common import JsonObject
from server.protocol.responses import ResponsesRequest
from server.sse import named_frame
from server.structured.parser import AnswerSyntax, Kind, Piece
from server.text.output import LogprobEntry
from server.translate.chat_writer import new_call_id
from server.translate.parts import ResponseHead, Timings, chat_logprobs, num_reasoning_tokens

_PREFIXES: Final = {"content": "msg_", "reasoning": "rs_", "call": "fc_"}


@dataclass(slots=True)
class _Item:
    """One item of the output, as far as it is known."""

    kind: Kind
    call: int
    id: str
    name: str = ""
    call_id: str = ""
    text: str = ""
    logprobs: list[LogprobEntry] = field(default_factory=list)


class ResponsesWriter:
    """The response of one request, whole or as events."""

    def __init__(self, body: ResponsesRequest, head: ResponseHead, generation: Generation) -> None:
        self._body = body
        self._head = head
        self._generation = generation
        self._syntax = generation.plan.syntax
        self._parser = (self._syntax or AnswerSyntax()).parser()
        self._number = 0  # of the next event
        self._opened = False
        self._items: list[_Item] = []  # the last of them is open
        self._finish = "length"
        self._num_reasoning_tokens = 0

    # Events

    def part(self, part: Part) -> bytes:
        opening = b"" if self._opened else self._opening()
        return opening + b"".join(event for news in self._pieces(part) for event in self._tell(*news))

    def _pieces(self, part: Part | Answer) -> Iterator[tuple[Piece, Sequence[LogprobEntry]]]:
        """What is new, the logprobs with its first text; of an answer that holds nothing but text, as it comes."""
        self._finish = part.finish or self._finish
        entries: Sequence[LogprobEntry] = part.logprobs
        if self._syntax is None:
            pieces = [Piece("content", part.text)] if part.text or entries else []
        else:
            pieces = self._parser.feed(part.text)
            if isinstance(part, Part) and self._parser.in_reasoning:
                self._num_reasoning_tokens += len(part.token_ids)
            pieces += [] if part.finish is None else self._parser.end()
        for piece in pieces:
            told, entries = (entries, ()) if piece.kind == "content" else ((), entries)
            yield piece, told

    def _opening(self) -> bytes:
        self._opened = True
        started = self._response("in_progress", [], usage=False)
        events = [self._event("response.created", response=started)]
        events.append(self._event("response.in_progress", response=started))
        if self._syntax is None:
            events += self._open(Piece("content", ""))
        return b"".join(events)

    def _tell(self, piece: Piece, entries: Sequence[LogprobEntry]) -> Iterator[bytes]:
        if not self._is_open(piece):
            yield from self._close()
            yield from self._open(piece)
        item = self._add(piece, entries)
        where: JsonObject = {"item_id": item.id, "output_index": len(self._items) - 1}
        if piece.kind == "arguments":
            yield self._event("response.function_call_arguments.delta", **where, delta=piece.text)
        elif piece.kind == "reasoning":
            yield self._event("response.reasoning_text.delta", **where, content_index=0, delta=piece.text)
        elif piece.kind == "content":
            logprobs = self._logprobs(entries)
            yield self._event(
                "response.output_text.delta", **where, content_index=0, delta=piece.text, logprobs=logprobs
            )

    def _is_open(self, piece: Piece) -> bool:
        if not self._items:
            return False
        kind = "call" if piece.kind == "arguments" else piece.kind
        return (self._items[-1].kind, self._items[-1].call) == (kind, piece.call)

    def _add(self, piece: Piece, entries: Sequence[LogprobEntry]) -> _Item:
        """To the open item."""
        item = self._items[-1]
        if piece.kind != "call":
            item.text += piece.text
        item.logprobs += entries
        return item

    def _new_item(self, piece: Piece) -> _Item:
        first = self._head.id.removeprefix("resp_") if piece.kind == "content" else uuid.uuid4().hex
        call_id = new_call_id(self._syntax or AnswerSyntax()) if piece.kind == "call" else ""
        name = piece.text if piece.kind == "call" else ""
        self._items.append(_Item(piece.kind, piece.call, _PREFIXES[piece.kind] + first, name, call_id))
        return self._items[-1]

    def _open(self, piece: Piece) -> Iterator[bytes]:
        item = self._new_item(piece)
        index = len(self._items) - 1
        yield self._event("response.output_item.added", output_index=index, item=_wire(item, "in_progress", []))
        if item.kind != "call":
            part = self._content(item)
            yield self._event(
                "response.content_part.added", item_id=item.id, output_index=index, content_index=0, part=part
            )

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """The open item is complete, or as complete as it gets."""
        if not self._items:
            return
        item, index = self._items[-1], len(self._items) - 1
        where: JsonObject = {"item_id": item.id, "output_index": index}
        if item.kind == "call":
            yield self._event("response.function_call_arguments.done", **where, name=item.name, arguments=item.text)
        else:
            part = self._content(item)
            kind, told = (
                ("output_text", {"logprobs": part["logprobs"]}) if item.kind == "content" else ("reasoning_text", {})
            )
            yield self._event(f"response.{kind}.done", **where, content_index=0, text=item.text, **told)
            yield self._event("response.content_part.done", **where, content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=index, item=self._item(item, status))

    def closing(self, timings: Timings) -> bytes:
        status = _status(self._finish)
        events = list(self._close(status))
        response = self._response(status, self._output(status))
        return b"".join([*events, self._event(f"response.{status}", response=response)])

    def error(self, error: Exception) -> bytes:
        """The event that tells of an error; no other follows it."""
        return error_event(error, self._next_number())

    def _event(self, kind: str, **fields: object) -> bytes:
        return named_frame(kind, orjson.dumps({"type": kind, **fields, "sequence_number": self._next_number()}))

    def _next_number(self) -> int:
        self._number += 1
        return self._number - 1

    # The whole

    def response(self, answers: Sequence[Answer], timings: Timings) -> bytes:
        answer = answers[0]
        tokenizer = self._generation.tokenizer
        self._num_reasoning_tokens = num_reasoning_tokens(self._syntax, answer.token_ids, tokenizer)
        if self._syntax is None:
            self._new_item(Piece("content", ""))
        for piece, entries in self._pieces(answer):
            if not self._is_open(piece):
                self._new_item(piece)
            self._add(piece, entries)
        status = _status(answer.finish)
        return orjson.dumps(self._response(status, self._output(status)))

    def _output(self, status: str) -> list[JsonObject]:
        """All items, of which the last may be incomplete."""
        return [self._item(item, status if item is self._items[-1] else "completed") for item in self._items]

    def _item(self, item: _Item, status: str) -> JsonObject:
        return _wire(item, status, [self._content(item)] if item.kind != "call" else [])

    def _content(self, item: _Item) -> JsonObject:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        logprobs = self._logprobs(item.logprobs)
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> list[JsonObject]:
        if not entries:
            return []
        content: list[JsonObject] = chat_logprobs(entries, self._body.top_logprobs or 0)["content"]
        return content

    def _response(self, status: str, output: list[JsonObject], *, usage: bool = True) -> JsonObject:
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
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if usage else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> JsonObject:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _wire(item: _Item, status: str, content: list[JsonObject]) -> JsonObject:
    if item.kind == "call":
        return {
            "id": item.id,
            "type": "function_call",
            "call_id": item.call_id,
            "name": item.name,
            "arguments": item.text if status != "in_progress" else "",
            "status": status,
        }
    if item.kind == "reasoning":
        return {"id": item.id, "type": "reasoning", "summary": [], "content": content, "status": status}
    return {"id": item.id, "type": "message", "role": "assistant", "status": status, "content": content}


def _status(finish: str) -> str:
    return "completed" if finish == "stop" else "incomplete"


def error_event(error: Exception, number: int) -> bytes:
    """The event number `number`, which tells of an error."""
    detail = to_wire(error).body["error"]
    fields = {name: detail[name] for name in ("code", "message", "param")}
    return named_frame("error", orjson.dumps({"type": "error", **fields, "sequence_number": number}))
