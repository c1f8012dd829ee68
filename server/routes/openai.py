"""The OpenAI endpoints that ask the model."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from server.protocol.chat import ChatRequest, ChatResponse
from server.protocol.completions import CompletionRequest, CompletionResponse
from server.protocol.embeddings import EmbeddingRequest, EmbeddingResponse
from server.routes.base import STREAM, CallDep, ServerDep, router
from server.service import Work
from server.translate.chat import ChatJob
from server.translate.completions import CompletionJob
from server.translate.embeddings import EmbeddingJob

routes = router("OpenAI")


@routes.post("/v1/completions", response_model=CompletionResponse, responses=STREAM)
async def create_completion(body: CompletionRequest, request: Request, server: ServerDep, call: CallDep) -> Response:
    """Continue a text."""
    work = Work(server, call, CompletionJob(body))
    return work.stream() if body.stream else await work.answer(request)


@routes.post("/v1/chat/completions", response_model=ChatResponse, responses=STREAM)
async def create_chat_completion(body: ChatRequest, request: Request, server: ServerDep, call: CallDep) -> Response:
    """Answer a conversation."""
    work = Work(server, call, ChatJob(body))
    return work.stream() if body.stream else await work.answer(request)


@routes.post("/v1/embeddings", response_model=EmbeddingResponse)
async def create_embeddings(body: EmbeddingRequest, request: Request, server: ServerDep, call: CallDep) -> Response:
    """Texts as vectors of unit length."""
    return await Work(server, call, EmbeddingJob(body)).answer(request)
