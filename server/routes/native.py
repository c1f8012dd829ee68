"""The plain API, for people who want no wrapper."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.responses import Response

from server.door import Call
from server.errors import InvalidRequest, to_wire
from server.protocol.native import BatchRequest, BatchResponse, GenerateRequest, GenerateResponse
from server.routes.base import STREAM, CallDep, ServerDep, router
from server.service import Work, until_disconnect
from server.state import Server
from server.translate.native import GenerateJob

routes = router("Native")


@routes.post("/generate", response_model=GenerateResponse)
async def generate(body: GenerateRequest, request: Request, server: ServerDep, call: CallDep) -> Response:
    """Continue a text."""
    return await Work(server, call, GenerateJob(body)).answer(request)


@routes.post("/generate/stream", response_class=Response, responses=STREAM)
async def generate_stream(body: GenerateRequest, server: ServerDep, call: CallDep) -> Response:
    """Continue a text: an event a token, then one with the totals."""
    return Work(server, call, GenerateJob(body, streams=True)).stream()


@routes.post("/generate/batch", response_model=BatchResponse)
async def generate_batch(body: BatchRequest, request: Request, server: ServerDep, call: CallDep) -> Response:
    """Continue many texts, each with its own parameters."""
    limit = server.settings.max_prompts
    if len(body.requests) > limit:
        raise InvalidRequest(f"requests: {len(body.requests)}, at most {limit} are allowed", param="requests")
    works = asyncio.gather(*[_answer_or_error(one, server, call) for one in body.requests])
    answers = await until_disconnect(request.receive, works)
    return Response(b'{"responses":[' + b",".join(answers) + b"]}", media_type="application/json")


async def _answer_or_error(body: GenerateRequest, server: Server, call: Call) -> bytes:
    try:
        return await Work(server, call, GenerateJob(body)).whole()
    except Exception as error:
        return to_wire(error).json()
