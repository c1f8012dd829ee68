"""The stateless part of the Responses API."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from server.protocol.chat import ChatRequest
from server.protocol.responses import InputFields, InputTokensResponse, ResponseObject, ResponsesRequest
from server.routes.base import STREAM, CallDep, ServerDep, router
from server.service import Work, note_unknown_fields, offload
from server.translate.messages import num_message_chars, prompt_tokens
from server.translate.responses import ResponsesJob, chat_fields, check_input

routes = router("OpenAI")


@routes.post("/v1/responses", response_model=ResponseObject, responses=STREAM)
async def create_response(body: ResponsesRequest, request: Request, server: ServerDep, call: CallDep) -> Response:
    """Answer an input."""
    work = Work(server, call, ResponsesJob(body))
    return work.stream() if body.stream else await work.answer(request)


@routes.post("/v1/responses/input_tokens")
async def count_input_tokens(body: InputFields, server: ServerDep, call: CallDep) -> InputTokensResponse:
    """The tokens that an input comes to."""
    model = server.model_named(body.model).text
    note_unknown_fields(body, call, strict=server.settings.strict_fields)
    check_input(body)
    chat = ChatRequest.model_validate(chat_fields(body))
    size = num_message_chars(chat)
    tokens = await offload(size, lambda: prompt_tokens(chat, model, add_special_tokens=False))
    return InputTokensResponse(input_tokens=len(tokens))
