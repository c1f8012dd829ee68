"""The ASGI application, put together: no state outside of the Server object that it makes."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from engine.errors import EngineError
from engine.types import LoadProgress
from server.access import KeyRing
from server.door import UNMATCHED, Call, Door, route_path
from server.errors import REFUSALS, ApiError, NotFound, from_validation, refusal_reason, to_wire
from server.generation import ABORT_CAUSES
from server.logs import RequestLog
from server.routes import anthropic, health, models, native, openai, operator, responses, tokens, ui
from server.settings import Settings
from server.state import ServedModel, Server
from server.tracing import RequestTrace
from server.translate.anthropic import anthropic_error
from server.version import version

logger = logging.getLogger("octavo")
Loader = Callable[[Callable[[LoadProgress], None]], Awaitable[ServedModel]]
_LAG_SAMPLE_SECONDS = 0.1
_LOGGED_ERROR_CHARS = 300
_ROUTERS = (
    openai.routes,
    responses.routes,
    models.routes,
    tokens.routes,
    anthropic.routes,
    native.routes,
    health.routes,
    operator.routes,
    ui.routes,
)


def create_app(settings: Settings, load: Loader, on_failure: Callable[[Exception], None] | None = None) -> FastAPI:
    """An application that answers at once and serves once `load` has returned.

    `load` is awaited in the lifespan and reports its progress; when it fails, `on_failure` is told and the server
    stays not ready. Raises SettingsProblem for keys that cannot be used.
    """
    server = Server(settings, KeyRing.from_settings(settings))
    app = FastAPI(
        title="Octavo",
        version=version(),
        description="An OpenAI-compatible LLM server.",
        redirect_slashes=False,
        lifespan=_lifespan(server, load, on_failure),
    )
    app.state.server = server
    for routes in _ROUTERS:
        app.include_router(routes)
    server.metrics.expect((*_paths(app.routes), *_known_paths(), UNMATCHED), REFUSALS, ABORT_CAUSES)
    app.add_middleware(
        Door,
        root_path=settings.root_path,
        keys=server.keys,
        max_body_bytes=int(settings.max_body_bytes),
        respond=error_response,
        observe=_observer(server),
        refused=server.metrics.refused,
        trace=_tracer(server),
    )
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "server-timing", "retry-after"],
        )
    for error in (ApiError, EngineError):
        app.add_exception_handler(error, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    return app


def _observer(server: Server) -> Callable[[Call, str, str, int, float], None]:
    log = RequestLog(server.settings.access_log, server.settings.slow_request_seconds)

    def observe(call: Call, method: str, route: str, status: int, seconds: float) -> None:
        exemplar = None if call.trace is None else call.trace.exemplar
        server.metrics.http_answered(method, route, status, seconds, exemplar)
        if call.trace is not None:
            call.trace.finish(method, route, status, call.arrived + seconds)
        if log.is_slow(call, seconds):
            server.metrics.request_was_slow()
        log.write(call, method, route, status, seconds)

    return observe


def _tracer(server: Server) -> Callable[[Scope, float], RequestTrace | None]:
    """Opens the traces of requests that may run the model."""
    tracing = server.tracing

    def trace(scope: Scope, arrived: float) -> RequestTrace | None:
        if tracing is None or scope["method"] != "POST":
            return None
        return tracing.open(scope["headers"], arrived)

    return trace


def _lifespan(
    server: Server, load: Loader, on_failure: Callable[[Exception], None] | None
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    async def run() -> None:
        try:
            model = await load(server.note_progress)
        except Exception as error:
            if on_failure is None:
                raise
            on_failure(error)
            return
        server.start_serving(model)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = (
            asyncio.create_task(run(), name="load-model"),
            asyncio.create_task(_sample_lag(server.metrics.loop_lagged), name="sample-lag"),
        )
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if server.model is not None:
                await server.model.engine.close()
            if server.tracing is not None:
                await asyncio.to_thread(server.tracing.close)

    return lifespan


async def _sample_lag(observe: Callable[[float], None]) -> None:
    """How much later than asked a sleep ends: what everything else on this loop has to wait, too."""
    loop = asyncio.get_running_loop()
    while True:
        asked = loop.time() + _LAG_SAMPLE_SECONDS
        await asyncio.sleep(_LAG_SAMPLE_SECONDS)
        observe(max(0.0, loop.time() - asked))


def error_response(path: str, error: Exception) -> Response:
    """An error in the shape of the API that the path belongs to."""
    wire = to_wire(error)
    return (anthropic_error(wire) if path.startswith("/v1/messages") else wire).response()


async def _answer_error(request: Request, error: Exception) -> Response:
    call, server = request.state.call, request.app.state.server
    reason = refusal_reason(error)
    if reason is not None and not call.facts:  # else the engine has worked on it
        server.metrics.refused(reason)
    call.facts.setdefault("error", str(error)[:_LOGGED_ERROR_CHARS])
    return error_response(route_path(request.scope), error)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    problems = error.errors() if isinstance(error, RequestValidationError) else ()
    return await _answer_error(request, from_validation(problems))


async def _answer_http(request: Request, error: Exception) -> Response:
    """The framework's own errors; a path that is not there gets the nearest one that is."""
    if isinstance(error, HTTPException) and error.status_code == 404 and "route" not in request.scope:
        error = NotFound(_what_is_there(request))
    return error_response(route_path(request.scope), error)


def _paths(routes: Iterable[object]) -> list[str]:
    return [route.path for route in routes if isinstance(route, Route)]


def _known_paths() -> list[str]:
    return [path for routes in _ROUTERS for path in _paths(routes.routes)]


def _what_is_there(request: Request) -> str:
    path = route_path(request.scope)
    known = _known_paths()
    message = f"There is no {path[:200]} here."
    if f"/v1{path}" in known:
        return f"{message} Did you mean /v1{path}? The base URL of this API ends in /v1"
    if near := difflib.get_close_matches(path[:200], known, 1, 0.6):
        return f"{message} Did you mean {near[0]}?"
    return f"{message} /docs lists what there is"
