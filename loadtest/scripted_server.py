"""A server with no model and known delays: what a load generator reports of it can be checked exactly.

    python -m loadtest.scripted_server --port 8099 --ttft-seconds 0.05 --gap-seconds 0.01

Speaks /v1/completions, /v1/chat/completions (streamed), /v1/models, /tokenize (a word is a token), /health, /metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests", 500: "Server Error"}


@dataclass(frozen=True, slots=True)
class Answer:
    """How one generation request is answered."""

    ttft_seconds: float = 0.0
    gap_seconds: float = 0.0
    num_tokens: int | None = None  # None: as many as max_tokens asks
    cached_tokens: int = 0
    status: int = 200
    stall_after: int | None = None  # says nothing more after so many tokens
    break_after: int | None = None  # closes the connection after so many tokens
    with_usage: bool = True


Script = Callable[[int, dict[str, Any]], Answer]  # (number of the request, its body) → answer


class ScriptedServer:
    """Answers by the script. With `max_running`, further requests queue in order of arrival."""

    def __init__(self, script: Script, max_running: int = 1_000_000) -> None:
        self.num_requests = 0
        self.num_left = 0  # clients that closed before the answer was complete
        self.bodies: list[dict[str, Any]] = []
        self._script = script
        self._slots = asyncio.Semaphore(max_running)
        self._running = 0
        self._waiting = 0
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def start(self, port: int = 0) -> str:
        """Listens on loopback; returns the base URL."""
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Closes the listening socket and every connection; returns when no handler runs any more."""
        if self._server is not None:
            self._server.close()
        for writer in self._open.values():
            writer.transport.abort()
        await asyncio.gather(*self._open)

    async def serve_forever(self) -> None:
        """Returns only by cancellation."""
        if self._server is not None:
            await self._server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = int(head.partition("content-length:")[2].partition("\r\n")[0] or 0)
                body = await reader.readexactly(length)
                await self._route(head.split(" ", 2)[1], body, reader, writer)
        writer.close()
        del self._open[task]

    async def _route(self, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match path:
            case "/v1/completions" | "/v1/chat/completions":
                await self._generate(path, body, reader, writer)
            case "/health":
                _respond(writer, 200, {"status": "ok"})
            case "/v1/models":
                _respond(writer, 200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})
            case "/tokenize":
                _respond(writer, 200, {"tokens": list(range(_num_words(orjson.loads(body))))})
            case "/metrics":
                page = f"octavo_requests_running {self._running}\noctavo_requests_waiting {self._waiting}\n"
                _respond(writer, 200, page)
            case _:
                _respond(writer, 404, _error("no such route"))

    async def _generate(
        self, path: str, data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError:
            _respond(writer, 400, _error("the body is not JSON"))
            return
        if body.get("temperature", 0) < 0:
            _respond(writer, 400, _error("temperature must not be negative"))
            return
        answer = self._script(self.num_requests, body)
        self.num_requests += 1
        self.bodies.append(body)
        if answer.status != 200:
            _respond(writer, answer.status, _error("scripted"))
            return
        self._waiting += 1
        async with self._slots:
            self._waiting -= 1
            self._running += 1
            try:
                await self._stream(answer, body, "chat" in path, reader, writer)
            finally:
                self._running -= 1

    async def _stream(
        self,
        answer: Answer,
        body: dict[str, Any],
        chat: bool,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        loop = asyncio.get_running_loop()
        due = loop.time() + answer.ttft_seconds
        asked = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        num_tokens = asked if answer.num_tokens is None else answer.num_tokens
        for number in range(num_tokens):
            if number == answer.stall_after:
                await reader.read()  # until the client gives up
            if number == answer.break_after:
                raise ConnectionResetError
            await asyncio.sleep(max(0.0, due - loop.time()))
            if reader.at_eof():
                self.num_left += 1
                raise ConnectionResetError
            _event(writer, _chunk(f"w{number} ", chat, None))
            await writer.drain()
            due += answer.gap_seconds
        _event(writer, _chunk("", chat, "length"))
        if answer.with_usage:
            prompt_tokens = _num_words(body)
            usage = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": num_tokens,
                "total_tokens": prompt_tokens + num_tokens,
                "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            }
            _event(writer, orjson.dumps({"choices": [], "usage": usage}))
        _event(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")


def _num_words(body: dict[str, Any]) -> int:
    if "prompt" in body:
        return len(body["prompt"].split())
    contents = [message["content"] for message in body["messages"]]
    parts = [content if isinstance(content, list) else [{"text": content}] for content in contents]
    return sum(len(part.get("text", "").split()) for content in parts for part in content)


def _chunk(text: str, chat: bool, finish_reason: str | None) -> bytes:
    part: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return orjson.dumps({"object": kind, "choices": [{"index": 0, **part, "finish_reason": finish_reason}]})


def _event(writer: asyncio.StreamWriter, data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def _respond(writer: asyncio.StreamWriter, status: int, content: dict[str, Any] | str) -> None:
    body = content.encode() if isinstance(content, str) else orjson.dumps(content)
    kind = "text/plain" if isinstance(content, str) else "application/json"
    writer.write(
        f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


async def _serve(args: argparse.Namespace) -> None:
    answer = Answer(args.ttft_seconds, args.gap_seconds, stall_after=args.stall_after)
    server = ScriptedServer(lambda _number, _body: answer, args.max_running)
    await server.start(args.port)
    await server.serve_forever()


def main(argv: list[str] | None = None) -> None:
    """Serves until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.scripted_server", description=__doc__)
    parser.add_argument("--port", type=int, default=8099)
    parser.add_argument("--ttft-seconds", type=float, default=0.05)
    parser.add_argument("--gap-seconds", type=float, default=0.01)
    parser.add_argument("--max-running", type=int, default=1_000_000, help="further requests wait their turn")
    parser.add_argument("--stall-after", type=int, help="say nothing more after so many tokens")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
