"""Anthropic's /v1/messages: parts and answers → events and message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import orjson

from server.generation import Answer, Generation, Part
from server.protocol.common import JsonObject
from server.sse import named_frame
from server.structured.parser import AnswerSyntax, Piece, added_up
from server.translate.chat_writer import new_call_id
from server.translate.parts import ResponseHead, Timings

_PLAIN: Final = AnswerSyntax()
_DELTAS: Final = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}


class MessagesWriter:
    """The message of one request, whole or as events."""

    def __init__(self, head: ResponseHead, generation: Generation) -> None:
        self._head = head
        self._generation = generation
        self._syntax = generation.plan.syntax
        self._parser = None if self._syntax is None else self._syntax.parser()
        self._opened = False
        self._block: tuple[str, int] | None = None  # the open one: its kind, and of a call its number
        self._num_blocks = 0
        self._end: Part | None = None

    def part(self, part: Part) -> bytes:
        opening = b"" if self._opened else self._opening()
        if part.finish is not None:
            self._end = part
        if self._parser is None:
            return opening + (self._text_delta(part.text) if part.text else b"")
        pieces = self._parser.feed(part.text)
        if part.finish is not None:
            pieces += self._parser.end()
        return opening + b"".join(event for piece in pieces for event in self._events(piece))

    def _text_delta(self, text: str) -> bytes:
        """The common case, at the least cost: there is one block."""
        return (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
            + orjson.dumps(text)
            + b"}}\n\n"
        )

    def _opening(self) -> bytes:
        self._opened = True
        started = _event({"type": "message_start", "message": self._message([], None, None)})
        first = b"" if self._parser is not None else b"".join(self._open(Piece("content", "")))
        return started + first + _event({"type": "ping"})

    def _events(self, piece: Piece) -> Iterator[bytes]:
        kind = ("call" if piece.kind == "arguments" else piece.kind, piece.call)
        if kind != self._block:
            yield from self._close()
            yield from self._open(piece)
        if piece.kind == "call":
            return
        name, key = _DELTAS.get(piece.kind, ("input_json_delta", "partial_json"))
        delta = {"type": name, key: piece.text}
        yield _event({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta})

    def _open(self, piece: Piece) -> Iterator[bytes]:
        self._block = (piece.kind, piece.call)
        self._num_blocks += 1
        block = self._content(piece.kind, "", piece.text)
        yield _event({"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block})

    def _close(self) -> Iterator[bytes]:
        if self._block is not None:
            yield _event({"type": "content_block_stop", "index": self._num_blocks - 1})
        self._block = None

    def _content(self, kind: str, text: str, name: str = "", values: JsonObject | None = None) -> JsonObject:
        """A block of the message."""
        if kind == "content":
            return {"type": "text", "text": text}
        if kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        call_id = new_call_id(self._syntax or _PLAIN).replace("call_", "toolu_")
        return {"type": "tool_use", "id": call_id, "name": name, "input": values or {}}

    def closing(self, timings: Timings) -> bytes:
        end = self._end
        stop = None if end is None else end.stop
        reason = self._stop_reason(None if end is None else end.finish, stop)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return (
            b"".join(self._close())
            + _event({"type": "message_delta", "delta": delta, "usage": self._usage()})
            + _event({"type": "message_stop"})
        )

    def response(self, answers: Sequence[Answer], timings: Timings) -> bytes:
        answer = answers[0]
        content = [self._content("content", answer.text)]
        if self._parser is not None:
            content = self._read(self._parser.feed(answer.text) + self._parser.end())
        reason = self._stop_reason(answer.finish, answer.stop)
        return orjson.dumps(self._message(content, reason, answer.stop))

    def _read(self, pieces: Sequence[Piece]) -> list[JsonObject]:
        """The blocks of an answer of which not all is text."""
        told = added_up(pieces)
        content = [self._content("reasoning", told.reasoning)] if told.reasoning else []
        if told.content.strip() or not told.calls:
            content.append(self._content("content", told.content))
        return content + [self._content("call", "", name, _object(arguments)) for name, arguments in told.calls]

    def _stop_reason(self, finish: str | None, stop: str | None) -> str:
        if finish == "length":
            return "max_tokens"
        if self._parser is not None and self._parser.num_calls and not self._parser.in_call:
            return "tool_use"
        return "end_turn" if stop is None else "stop_sequence"

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


def _object(arguments: str) -> JsonObject:
    """A call's arguments; {} where they were cut short, as a message holds no half of an object."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _event(data: JsonObject) -> bytes:
    return named_frame(data["type"], orjson.dumps(data))
