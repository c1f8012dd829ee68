"""Anthropic's messages."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from server.protocol.anthropic import CountTokensRequest, CountTokensResponse, Message, MessagesRequest
from server.protocol.chat import ChatRequest
from server.routes.base import STREAM, CallDep, ServerDep, router
from server.service import Work, note_unknown_fields, offload
from server.translate.anthropic import MessagesJob, chat_fields, check_messages
from server.translate.messages import num_message_chars, prompt_tokens

routes = router("Anthropic")


@routes.post("/v1/messages", response_model=Message, responses=STREAM)
async def create_message(body: MessagesRequest, request: Request, server: ServerDep, call: CallDep) -> Response:
    """Answer a conversation."""
    work = Work(server, call, MessagesJob(body))
    return work.stream() if body.stream else await work.answer(request)


@routes.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, server: ServerDep, call: CallDep) -> CountTokensResponse:
    """The tokens that a conversation comes to."""
    model = server.model_named(body.model).text
    note_unknown_fields(body, call, strict=server.settings.strict_fields)
    check_messages(body)
    chat = ChatRequest.model_validate(chat_fields(body))
    size = num_message_chars(chat)
    tokens = await offload(size, lambda: prompt_tokens(chat, model, add_special_tokens=False))
    return CountTokensResponse(input_tokens=len(tokens))
