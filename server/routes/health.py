"""For whoever watches over the server: alive, ready, metrics, version."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from server.errors import NotReady, to_wire
from server.routes.base import ServerDep, router
from server.version import version

routes = router("Operations")


@routes.get("/health")
async def health(server: ServerDep) -> dict[str, Any]:
    """200 as long as the process is alive, whatever the model does; with a few figures for people."""
    return {"status": "ok"} | server.figures()


@routes.get("/ready")
async def ready(server: ServerDep) -> Response:
    """200 when a request would be served now, else 503 and why."""
    if server.ready:
        return JSONResponse({"status": "ready"})
    reason = server.not_ready_reason()
    wire = to_wire(NotReady(reason))
    return JSONResponse({"status": "not ready", "reason": reason} | wire.body, 503, headers=wire.headers)


@routes.get("/metrics", response_class=Response)
async def metrics(request: Request, server: ServerDep) -> Response:
    """For Prometheus: its text format, or OpenMetrics, with exemplars, for who asks for it."""
    return server.metrics_response(request.headers.get("accept", ""))


@routes.get("/version")
async def get_version() -> dict[str, str]:
    """Of Octavo."""
    return {"version": version()}


# Load balancers ask with HEAD.
routes.head("/health", include_in_schema=False)(health)
routes.head("/ready", include_in_schema=False)(ready)
