"""For whoever runs the server: what the engine is doing, and what it may forget."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import JSONResponse, Response

from engine.profile import MAX_STEPS
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


@routes.post("/debug/profile/start")
async def start_profile(
    server: ServerDep, steps: Annotated[int, Query(ge=1, le=MAX_STEPS, description="steps at most")] = 200
) -> dict[str, int]:
    """Note what the engine does in its next steps, operation by operation; it is somewhat slower meanwhile."""
    server.serving().engine.start_profile(steps)
    return {"steps": steps}


@routes.post("/debug/profile/stop", responses={200: {"content": {"application/json": {}}}})
async def stop_profile(server: ServerDep) -> Response:
    """The trace so far, for https://ui.perfetto.dev: no text, no tokens."""
    trace = await server.serving().engine.stop_profile()
    disposition = 'attachment; filename="octavo-trace.json"'
    return Response(trace, media_type="application/json", headers={"content-disposition": disposition})
