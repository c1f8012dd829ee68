"""/v1/chat/completions: parts and answers → chunks and response."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

import orjson

from server.generation import Answer, Generation, Part
from server.protocol.chat import ChatRequest
from server.protocol.common import JsonObject
from server.sse import DONE, frame
from server.structured.parser import AnswerParser, AnswerSyntax, Piece, added_up
from server.translate.parts import (
    ResponseHead,
    Timings,
    chat_logprobs,
    num_reasoning_tokens,
    prompt_logprobs,
    usage_fields,
)
from server.translate.sampling import check_stream_options


class ChatWriter:
    """The wire form of one chat request's answers: chunks while it runs, or the response at its end."""

    def __init__(self, body: ChatRequest, head: ResponseHead, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._num_choices = generation.plan.num_choices
        self._keep_tokens = generation.plan.output.keep_tokens
        self._tier = {} if body.service_tier is None else {"service_tier": "default"}
        self._fields = head.fields("chat.completion.chunk") | self._tier
        self._head = head
        self._include_usage = check_stream_options(body.stream, body.stream_options)
        self._before = orjson.dumps(self._fields)[:-1] + b',"choices":[{"index":'
        self._after = b'},"logprobs":null,"finish_reason":null}]' + (b',"usage":null}' if self._include_usage else b"}")
        self._opened = False
        self._syntax = generation.plan.syntax
        self._legacy = bool(body.functions)
        self._num_reasoning_tokens = 0
        self._parsers = [] if self._syntax is None else [self._syntax.parser() for _ in range(self._num_choices)]

    # Chunks

    def part(self, part: Part) -> bytes:
        """The frames of one part."""
        opening = b"" if self._opened else self._opening()
        if self._syntax is not None:
            return opening + b"".join(self._read(part, self._parsers[part.choice], self._syntax))
        if not self._keep_tokens:
            text = self._plain(part) if part.text else b""
        else:
            text = self._tokens(part) if part.text or part.token_ids else b""
        if part.finish is None:
            return opening + text
        return opening + text + self._chunk({"index": part.choice, "delta": {}, "finish_reason": part.finish})

    def _opening(self) -> bytes:
        """Each choice's role, in the order of the choices: clients place choices by the order of their first chunks."""
        self._opened = True
        about = self._about_prompt()
        calls = self._syntax is not None and self._syntax.calls is not None
        delta = {"role": "assistant", "content": None if calls else "", "refusal": None}
        frames = []
        for index in range(self._num_choices):
            frames.append(self._chunk({"index": index, "delta": delta, "finish_reason": None}, about))
            about = {}
        return b"".join(frames)

    def _plain(self, part: Part) -> bytes:
        """The common case, at the least cost."""
        return frame(
            b'%b%d,"delta":{"content":%b%b' % (self._before, part.choice, orjson.dumps(part.text), self._after)
        )

    def _tokens(self, part: Part) -> bytes:
        choice: JsonObject = {"index": part.choice, "delta": {"content": part.text}, "finish_reason": None}
        return self._chunk(choice | self._about_tokens(part))

    def _about_tokens(self, part: Part | Answer) -> JsonObject:
        about: JsonObject = {}
        if self._body.logprobs:
            about["logprobs"] = chat_logprobs(part.logprobs, self._body.top_logprobs or 0)
        if self._body.return_token_ids:
            about["token_ids"] = part.token_ids
        return about

    def _read(self, part: Part, parser: AnswerParser, syntax: AnswerSyntax) -> Iterator[bytes]:
        """The frames of a part of which not all is text; what is known of its tokens goes with the first."""
        pieces = parser.feed(part.text)
        self._num_reasoning_tokens += len(part.token_ids) if parser.in_reasoning else 0
        if part.finish is not None:
            pieces += parser.end()
        deltas = [self._delta(piece, syntax) for piece in pieces]
        about = self._about_tokens(part) if part.token_ids else {}
        if about and not deltas:
            deltas = [{}]
        for delta in deltas:
            yield self._chunk({"index": part.choice, "delta": delta, "finish_reason": None} | about)
            about = {}
        if part.finish is not None:
            finish = self._finish(parser, part.finish)
            yield self._chunk({"index": part.choice, "delta": {}, "finish_reason": finish})

    def _delta(self, piece: Piece, syntax: AnswerSyntax) -> JsonObject:
        """Clients add strings up: id, type and name come once, with a call's first delta."""
        if piece.kind == "content":
            return {"content": piece.text}
        if piece.kind == "reasoning":
            return {"reasoning_content": piece.text}
        if piece.kind == "arguments":
            function = {"arguments": piece.text}
            return {"function_call": function} if self._legacy else {"tool_calls": [_part_of(piece, function)]}
        function = {"name": piece.text, "arguments": ""}
        if self._legacy:
            return {"function_call": function}
        return {
            "tool_calls": [{"index": piece.call, "id": new_call_id(syntax), "type": "function", "function": function}]
        }

    def _finish(self, parser: AnswerParser, finish: str) -> str:
        if finish != "stop" or not parser.num_calls or parser.in_call:
            return finish
        return "function_call" if self._legacy else "tool_calls"

    def closing(self, timings: Timings) -> bytes:
        """What comes after the last part."""
        fields: JsonObject = {}
        if self._include_usage:
            fields["usage"] = usage_fields(self._generation.usage, self._num_reasoning_tokens)
        if self._body.return_timings:
            fields["timings"] = timings.fields()
        return (frame(orjson.dumps(self._fields | {"choices": []} | fields)) if fields else b"") + DONE

    def _chunk(self, choice: JsonObject, about: JsonObject | None = None) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return frame(orjson.dumps(self._fields | {"choices": [{"logprobs": None} | choice]} | usage | (about or {})))

    # The whole

    def response(self, answers: Sequence[Answer], timings: Timings) -> bytes:
        tokenizer = self._generation.tokenizer
        reasoning = sum(num_reasoning_tokens(self._syntax, answer.token_ids, tokenizer) for answer in answers)
        body = (
            self._head.fields("chat.completion")
            | self._tier
            | {
                "choices": [self._whole(index, answer) for index, answer in enumerate(answers)],
                "usage": usage_fields(self._generation.usage, reasoning),
            }
            | self._about_prompt()
        )
        if self._body.return_timings:
            body["timings"] = timings.fields()
        return orjson.dumps(body)

    def _whole(self, index: int, answer: Answer) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": answer.text, "refusal": None}
        finish: str = answer.finish
        if self._syntax is not None:
            parser = self._syntax.parser()
            pieces = parser.feed(answer.text) + parser.end()
            message |= self._read_whole(pieces, self._syntax)
            finish = self._finish(parser, finish)
        choice: JsonObject = {"index": index, "message": message, "logprobs": None, "finish_reason": finish}
        return choice | self._about_tokens(answer)

    def _read_whole(self, pieces: Sequence[Piece], syntax: AnswerSyntax) -> JsonObject:
        """The fields of a message that depend on what an answer consists of."""
        told = added_up(pieces)
        fields: JsonObject = {"content": told.content if told.content.strip() or not told.calls else None}
        if told.reasoning:
            fields["reasoning_content"] = told.reasoning
        functions = [{"name": name, "arguments": arguments} for name, arguments in told.calls]
        if functions and self._legacy:
            fields["function_call"] = functions[0]
        elif functions:
            fields["tool_calls"] = [
                {"id": new_call_id(syntax), "type": "function", "function": function} for function in functions
            ]
        return fields

    # Both

    def _about_prompt(self) -> JsonObject:
        generation, about = self._generation, dict[str, object]()
        if self._body.return_token_ids:
            about["prompt_token_ids"] = generation.plan.prompts[0].token_ids
        if self._body.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_logprobs(
                generation.prompt_logprobs[0], self._body.prompt_logprobs, generation.tokenizer
            )
        return about


def _part_of(piece: Piece, function: JsonObject) -> JsonObject:
    return {"index": piece.call, "function": function}


def new_call_id(syntax: AnswerSyntax) -> str:
    """An id that no other call has, of the length that the model's template may insist on."""
    num_chars = None if syntax.calls is None else syntax.calls.id_chars
    return f"call_{uuid.uuid4().hex[:24]}" if num_chars is None else uuid.uuid4().hex[:num_chars]
