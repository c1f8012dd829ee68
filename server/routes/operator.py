"""For whoever runs the server: what the engine is doing, and what it may forget."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from server.errors import NotReady
from server.routes.base import ServerDep, router

routes = router("Operations")


@routes.get("/debug/engine")
async def debug_engine(server: ServerDep) -> Response:
    """The engine's state, its last steps and the open requests, in numbers: no text, no tokens."""
    if server.model is None:
        raise NotReady(server.not_ready_reason())
    return JSONResponse(server.model.engine.flight_record())


@routes.post("/reset_prefix_cache")
async def reset_prefix_cache(server: ServerDep) -> dict[str, bool]:
    """Forget all cached prefixes that no running request uses."""
    server.serving().engine.reset_prefix_cache()
    return {"reset": True}
