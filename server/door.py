"""The door: what happens to every HTTP request before its route sees it and after it has answered.

In: a request id, the key (deny by default: only exact paths are open), the body read whole within its limits. Out: the
request id and the headers gathered on the way, one observation, and a 500 in the API's shape for what nobody caught.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from server.access import ANONYMOUS, OPEN_PATHS, KeyRing
from server.errors import BodyTooLarge
from server.tracing import RequestTrace

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_BODY_SECONDS = 60.0  # for the whole body to arrive
_DISCARD_SECONDS = 5.0  # for the rest of a body that is too large, so that the client gets to read the answer
UNMATCHED = "unmatched"  # stands for all paths that match no route
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@dataclass(slots=True)
class Call:
    """One HTTP request, from the door to its last byte."""

    id: str
    key: str = ANONYMOUS
    arrived: float = field(default_factory=time.monotonic)
    headers: dict[str, str] = field(default_factory=dict)  # added to the response when it starts
    status: int = 0  # 0 until the response starts
    facts: dict[str, object] = field(default_factory=dict)  # for the log: what the model was asked, and how it went
    trace: RequestTrace | None = None  # if it is traced


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


@dataclass(frozen=True)
class Door:
    """ASGI middleware. `observe(call, method, route, status, seconds)` is told of each answered request."""

    app: ASGIApp
    root_path: str  # a prefix that a proxy in front may strip or not
    keys: KeyRing
    max_body_bytes: int
    respond: Callable[[str, Exception], Response]  # of a path and what went wrong there
    observe: Callable[[Call, str, str, int, float], None]
    refused: Callable[[str], None]
    trace: Callable[[Scope, float], RequestTrace | None]  # of a request that has arrived now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        call = Call(_request_id(scope))
        call.trace = self.trace(scope, call.arrived)
        scope["root_path"] = self.root_path
        scope.setdefault("state", {})["call"] = call

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers["x-request-id"] = call.id
                headers.update(call.headers)
            if call.trace is None:
                await send(message)
                return
            begin = time.monotonic()
            await send(message)
            call.trace.send.add(begin, time.monotonic())

        with bound_contextvars(request_id=call.id):
            try:
                await self._admit(call, scope, receive, send_marked)
            except ClientGone:
                return
            except Exception as error:
                if call.status:
                    raise  # the answer is under way: the connection is cut, and the log has the error
                await self.respond(route_path(scope), error)(scope, receive, send_marked)
            finally:
                self._observe(call, scope)

    async def _admit(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        if route_path(scope) not in OPEN_PATHS:
            try:
                call.key = self.keys.identify(scope["headers"])
            except Exception:
                self.refused("unauthorized")
                raise
        body = await self._read_body(scope, receive)
        if call.trace is not None:
            call.trace.received = time.monotonic()
        await self.app(scope, _replay(body, receive), send)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises BodyTooLarge, HTTPException 408, ClientGone."""
        parts: list[bytes] = []
        declared, received = _declared_length(scope), 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while max(declared, received) <= self.max_body_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    received += len(parts[-1])
                    if not message.get("more_body", False) and received <= self.max_body_bytes:
                        return b"".join(parts)
        except TimeoutError as error:
            raise HTTPException(408, "The body did not arrive in time", {"connection": "close"}) from error
        self.refused("body_too_large")
        await _discard_rest(receive)
        raise BodyTooLarge(
            f"The body exceeds this server's limit of {self.max_body_bytes} bytes", headers={"connection": "close"}
        )

    def _observe(self, call: Call, scope: Scope) -> None:
        route = getattr(scope.get("route"), "path", UNMATCHED)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self.observe(call, method, route, call.status or 499, time.monotonic() - call.arrived)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return f"req_{uuid.uuid4().hex}"


def route_path(scope: Scope) -> str:
    """The path below root_path, as the router sees it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


async def _discard_rest(receive: Receive) -> None:
    try:
        async with asyncio.timeout(_DISCARD_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass
    except TimeoutError:
        return


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that hands out the body, then listens to the connection again."""
    message: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replayed() -> Message:
        nonlocal message
        if message is not None:
            first, message = message, None
            return first
        return await receive()

    return replayed
