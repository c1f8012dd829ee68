"""A request as the bytes that go over the wire."""

from __future__ import annotations

from typing import Any

import orjson

from loadtest.records import Request
from loadtest.target import Target
from loadtest.workloads import Manners

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def generation_request(target: Target, request: Request, endpoint: str) -> bytes:
    """The HTTP/1.1 request: streamed, greedy, end-of-sequence ignored, usage asked for.

    The request's own fields are merged over the defaults, the target's `extra_body` over both; a None there removes
    the field (for servers that refuse it).
    """
    return http_request(target, "POST", _PATHS[endpoint], _body(target, request, endpoint), request.api_key)


def http_request(target: Target, method: str, path: str, body: bytes = b"", api_key: str = "") -> bytes:
    """Request line, headers and body of one keep-alive request; `api_key` instead of the target's."""
    key_headers = {"authorization": f"Bearer {api_key}"} if api_key else target.headers
    headers = {"host": f"{target.host}:{target.port}", "accept": "*/*", **key_headers}
    if body:
        headers |= {"content-type": "application/json", "content-length": str(len(body))}
    lines = [f"{method} {target.path}{path} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _body(target: Target, request: Request, endpoint: str) -> bytes:
    if request.manners is Manners.MALFORMED:
        return b'{"prompt": "never closed'
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint == "chat":
        body["messages"] = [{"role": role, "content": text} for role, text in request.messages]
    else:
        body["prompt"] = " ".join(text for _, text in request.messages)
    if request.manners is Manners.IMPOSSIBLE:
        body["temperature"] = -1.0
    body |= request.body | target.extra_body
    return orjson.dumps({key: value for key, value in body.items() if value is not None})
