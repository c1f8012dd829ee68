"""The page: a chat and the engine at work. Static files of our own, nothing from outside."""

from __future__ import annotations

from pathlib import Path

from fastapi import Request
from starlette.responses import FileResponse, JSONResponse, Response

from server.errors import NotFound
from server.live import live_events
from server.routes.base import ServerDep, router
from server.sse import EventStream, error_frame
from server.version import version

routes = router("About the server")
_FOLDER = Path(__file__).resolve().parents[1] / "ui"
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


@routes.get("/", responses={200: {"content": {"text/html": {}}}})
async def index(request: Request, server: ServerDep) -> Response:
    """The page for browsers; for others where things are."""
    if server.settings.ui and "text/html" in request.headers.get("accept", ""):
        return FileResponse(_FOLDER / "index.html", headers=_HEADERS | {"vary": "accept"})
    names = [] if server.model is None or server.keys.digests else list(server.model.names)
    return JSONResponse(
        {
            "name": "octavo",
            "version": version(),
            "models": names,  # where keys are set, /v1/models tells those who have one
            "openai_base_url": "/v1",
            "documentation": "/docs",
            "health": "/health",
            "ready": "/ready",
            "metrics": "/metrics",
        },
        headers={"vary": "accept"},
    )


@routes.get("/ui/live", responses={200: {"content": {"text/event-stream": {}}}})
async def live(server: ServerDep) -> Response:
    """Server-sent events, some a second: the latest steps with their sequences, KV blocks by state, queue, rates."""
    _check(server.settings.ui)
    settings = server.settings
    return EventStream(
        live_events(server),
        comment_seconds=settings.stream_comment_seconds,
        slow_reader_seconds=settings.slow_reader_seconds,
        on_error=error_frame,
    )


@routes.get("/ui/style.css", include_in_schema=False)
async def style(server: ServerDep) -> Response:
    return _file("style.css", "text/css", served=server.settings.ui)


@routes.get("/ui/app.js", include_in_schema=False)
async def script(server: ServerDep) -> Response:
    return _file("app.js", "text/javascript", served=server.settings.ui)


@routes.get("/ui/live.js", include_in_schema=False)
async def live_script(server: ServerDep) -> Response:
    return _file("live.js", "text/javascript", served=server.settings.ui)


def _file(name: str, media_type: str, *, served: bool) -> Response:
    _check(served)
    return FileResponse(_FOLDER / name, media_type=media_type, headers=_HEADERS)


def _check(served: bool) -> None:
    if not served:
        raise NotFound("This server runs without its page (--no-ui)")
