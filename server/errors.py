"""What goes wrong, and what a client is told: one table from exception class to (status, type, code).

ApiError                    the server's own refusals, with a message fit for the client
├── InvalidRequest          400: the request cannot be served as it is; `param` names the field
│   ├── ContextTooLong      400: prompt and answer exceed the context
│   └── NotSupported        400: the API has this, this server or model does not
├── Unauthorized            401
├── NotFound                404
│   └── UnknownModel        404
├── Aborted                 409: ended by an abort
├── BodyTooLarge            413
├── UnsupportedMediaType    415
├── RateLimited             429: this key's allowance is used up
├── QueueFull               429: everybody's
├── NotReady                503: loading, or draining
├── EngineFailed            500: the engine failed on this request
└── DeadlineExceeded        504: the request took longer than it may
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.errors import EngineUnavailable, ProfileRefused, RequestRejected

logger = logging.getLogger("octavo")


class ApiError(Exception):
    """A refusal. The message is sent to the client."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.headers = dict(headers or {})


class InvalidRequest(ApiError):
    """The request cannot be served as it is."""


class ContextTooLong(InvalidRequest):
    """Prompt and answer together exceed the context."""


class NotSupported(InvalidRequest):
    """The API knows this field or value; this server or this model does not do it."""


class Unauthorized(ApiError):
    """No key, or a wrong one."""


class NotFound(ApiError):
    """Nothing is there."""


class UnknownModel(NotFound):
    """No model of that name is served."""


class Aborted(ApiError):
    """The request was ended by an abort."""


class BodyTooLarge(ApiError):
    """The body exceeds the limit."""


class UnsupportedMediaType(ApiError):
    """The body is not JSON."""


class RateLimited(ApiError):
    """The key's allowance is used up."""


class QueueFull(ApiError):
    """Too many requests are waiting."""


class NotReady(ApiError):
    """The model is loading or the server is draining."""


class EngineFailed(ApiError):
    """The engine failed on this request."""


class DeadlineExceeded(ApiError):
    """The request took longer than its own timeout or the server's."""


@dataclass(frozen=True)
class ErrorRow:
    """How one class of errors looks on the wire. `retry` False tells clients that trying again is useless."""

    status: int
    type: str
    code: str | None
    retry: bool = True


ERROR_TABLE: Mapping[type[Exception], ErrorRow] = {
    InvalidRequest: ErrorRow(400, "invalid_request_error", None, retry=False),
    ContextTooLong: ErrorRow(400, "invalid_request_error", "context_length_exceeded", retry=False),
    NotSupported: ErrorRow(400, "invalid_request_error", "unsupported_parameter", retry=False),
    RequestRejected: ErrorRow(400, "invalid_request_error", None, retry=False),
    Unauthorized: ErrorRow(401, "invalid_request_error", "invalid_api_key", retry=False),
    NotFound: ErrorRow(404, "invalid_request_error", "not_found", retry=False),
    UnknownModel: ErrorRow(404, "invalid_request_error", "model_not_found", retry=False),
    Aborted: ErrorRow(409, "invalid_request_error", "request_aborted", retry=False),
    ProfileRefused: ErrorRow(409, "invalid_request_error", "profile_refused", retry=False),
    BodyTooLarge: ErrorRow(413, "invalid_request_error", "request_too_large", retry=False),
    UnsupportedMediaType: ErrorRow(415, "invalid_request_error", "unsupported_media_type", retry=False),
    RateLimited: ErrorRow(429, "rate_limit_error", "rate_limit_exceeded"),
    QueueFull: ErrorRow(429, "rate_limit_error", "queue_full"),
    NotReady: ErrorRow(503, "server_error", "service_unavailable"),
    EngineUnavailable: ErrorRow(503, "server_error", "engine_unavailable"),
    EngineFailed: ErrorRow(500, "server_error", "engine_error", retry=False),
    DeadlineExceeded: ErrorRow(504, "server_error", "deadline_exceeded", retry=False),
    Exception: ErrorRow(500, "server_error", "internal_error"),
}

# What counts as a refusal: it came before the engine worked on the request. Limits are counted where they are checked.
_REFUSED: Mapping[type[Exception], str] = {
    InvalidRequest: "invalid",
    ContextTooLong: "context_length",
    NotSupported: "unsupported",
    UnknownModel: "unknown_model",
    UnsupportedMediaType: "media_type",
    NotReady: "not_ready",
    EngineUnavailable: "engine_unavailable",
}
_LIMITS = ("unauthorized", "body_too_large", "queue_full", "concurrency", "requests_per_minute", "tokens_per_minute")
REFUSALS = (*_REFUSED.values(), *_LIMITS)

RETRY_AFTER_SECONDS = 2.0  # for errors that a retry can cure and that name no time of their own


def refusal_reason(error: Exception) -> str | None:
    """One of REFUSALS; None for errors that are none, or are counted where they arise."""
    return next((_REFUSED[cls] for cls in type(error).__mro__ if cls in _REFUSED), None)


@dataclass(frozen=True)
class WireError:
    """An error as it is sent: the JSON object, the status and the headers that go with it."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    def json(self) -> bytes:
        return orjson.dumps(self.body)

    def response(self) -> Response:
        return Response(self.json(), self.status, headers=self.headers, media_type="application/json")


def to_wire(error: Exception) -> WireError:
    """What a client is told of an error: pure, but that an unexpected error is logged with its traceback."""
    if isinstance(error, HTTPException):
        return to_wire_status(error.status_code, str(error.detail), error.headers)
    row = next(ERROR_TABLE[cls] for cls in type(error).__mro__ if cls in ERROR_TABLE)
    if row is ERROR_TABLE[Exception]:
        logger.error("unexpected error", exc_info=error)
        message = "The server failed on this request; its log says more."
    else:
        message = str(error)
    headers = dict(error.headers) if isinstance(error, ApiError) else {}
    if not row.retry:
        headers["x-should-retry"] = "false"
    elif row.status in (429, 503):
        after = error.retry_after_seconds if isinstance(error, ApiError) else None
        headers.setdefault("retry-after", str(max(1, round(RETRY_AFTER_SECONDS if after is None else after))))
    param = error.param if isinstance(error, ApiError) else None
    return WireError(row.status, _envelope(message, row.type, param, row.code), headers)


def to_wire_status(status: int, message: str, headers: Mapping[str, str] | None = None) -> WireError:
    """An error that has a status and no class of its own: those that the HTTP layers below raise."""
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    useless = {"x-should-retry": "false"} if status < 500 and status != 408 else {}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return WireError(status, _envelope(message, kind, None, code), {**(headers or {}), **useless})


def _envelope(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def from_validation(problems: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """One clear refusal out of pydantic's report on a body: names the field and what it accepts."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {first['ctx']['error']} (at byte {first['loc'][-1]})")
    if first["loc"] == ("body",):
        return InvalidRequest("The body must be a JSON object.")
    path = _field_path(first["loc"])
    base = _union_base(first["loc"])
    if base is not None:  # every member of a union failed in its own way
        wanted = dict.fromkeys(_wanted(problem["msg"]) for problem in problems if _union_base(problem["loc"]) == base)
        return InvalidRequest(f"{_field_path(base)}: expected {', or '.join(wanted)}", param=path)
    if first["type"] == "missing":
        return InvalidRequest(f"Missing required field: {path}", param=path)
    return InvalidRequest(f"{path}: {first['msg'].removeprefix('Value error, ')}", param=path)


def _wanted(message: str) -> str:
    return message.removeprefix("Input should be ").removeprefix("a valid ")


def _is_member(part: object) -> bool:
    """Whether a part of a location names a member of a union."""
    return isinstance(part, str) and (not part.isidentifier() or part in ("str", "int", "float", "bool"))


def _union_base(location: Sequence[Any]) -> tuple[Any, ...] | None:
    """The location of the union that a problem lies in, or None."""
    index = next((index for index, part in enumerate(location) if _is_member(part)), None)
    return None if index is None else tuple(location[:index])


def _field_path(location: Sequence[Any]) -> str:
    """("body", "messages", 0, "role") → messages[0].role; the names of union members are left out."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _is_member(part):
            path += f".{part}" if path else part
    return path or "body"
