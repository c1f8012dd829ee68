"""The second port: /metrics without a key, and nothing else."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.state import Server


def metrics_app(server: Server) -> Starlette:
    """An application that only exposes a server's metrics."""

    async def metrics(request: Request) -> Response:
        return server.metrics_response(request.headers.get("accept", ""))

    return Starlette(routes=[Route("/metrics", metrics)])
