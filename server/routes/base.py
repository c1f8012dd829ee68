"""What all routes share: strict JSON bodies, the objects that handlers ask for, documented errors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from server.door import Call
from server.errors import UnsupportedMediaType
from server.protocol.common import ErrorResponse
from server.state import Server

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in (
        (400, "The request cannot be served; `param` names the field."),
        (401, "No API key, or a wrong one."),
        (404, "No such model, or nothing there."),
        (408, "The body did not arrive in time."),
        (409, "The request was aborted."),
        (413, "The body is too large."),
        (415, "The body is not JSON."),
        (429, "A limit is reached; Retry-After says when to come back."),
        (500, "The engine failed on this request."),
        (503, "Loading, draining, or the engine is down; Retry-After says when to come back."),
        (504, "The request took longer than its timeout or the server's."),
    )
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, server-sent events.",
        "content": {"text/event-stream": {}},
    }
}


class _JsonRequest(Request):
    """Parses strictly: no NaN, no lone surrogates, UTF-8 only; a 5 MB body takes about 5 ms."""

    async def json(self) -> Any:
        return orjson.loads(await self.body())


class JsonRoute(APIRoute):
    """A route whose body, if it takes one, is JSON and says so: a browser cannot send that across origins unasked."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        takes_body = self.body_field is not None

        async def checked(request: Request) -> Response:
            if takes_body and not _is_json(request.headers.get("content-type", "")):
                raise UnsupportedMediaType("Send the body as JSON, with the header 'Content-Type: application/json'")
            return await handle(_JsonRequest(request.scope, request.receive))

        return checked


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


def router(tag: str) -> APIRouter:
    return APIRouter(tags=[tag], route_class=JsonRoute, responses=ERRORS)


async def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


async def _call(request: Request) -> Call:
    call: Call = request.state.call
    return call


ServerDep = Annotated[Server, Depends(_server)]
CallDep = Annotated[Call, Depends(_call)]
