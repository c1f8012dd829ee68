"""Tokens without an answer: tokenize, detokenize, render; and ending a request by its id."""

from __future__ import annotations

from server.errors import InvalidRequest
from server.plan import ModelText
from server.protocol.chat import ChatRequest
from server.protocol.tokens import (
    AbortRequest,
    AbortResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    RenderResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from server.routes.base import CallDep, ServerDep, router
from server.service import note_unknown_fields, offload
from server.translate.completions import encode
from server.translate.messages import num_message_chars, prompt_tokens, render
from server.translate.sampling import check_token_ids

routes = router("Tokens")


@routes.post("/tokenize", response_model_exclude_none=True)
async def tokenize(body: TokenizeRequest, server: ServerDep, call: CallDep) -> TokenizeResponse:
    """The tokens of a text, or of messages."""
    model = server.model_named(body.model).text
    note_unknown_fields(body, call, strict=server.settings.strict_fields)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: give either prompt or messages", param="prompt")
    num_chars = len(body.prompt or "") + num_message_chars(body)
    tokens = await offload(num_chars, lambda: _tokens(body, model))
    strings = [model.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return TokenizeResponse(count=len(tokens), max_model_len=model.max_model_len, tokens=tokens, token_strs=strings)


def _tokens(body: TokenizeRequest, model: ModelText) -> list[int]:
    if body.prompt is None:
        return prompt_tokens(body, model, add_special_tokens=body.add_special_tokens is True)
    return encode(body.prompt, "prompt", model.tokenizer, add_special_tokens=body.add_special_tokens is not False)


@routes.post("/detokenize")
async def detokenize(body: DetokenizeRequest, server: ServerDep, call: CallDep) -> DetokenizeResponse:
    """The text of tokens."""
    model = server.model_named(body.model).text
    note_unknown_fields(body, call, strict=server.settings.strict_fields)
    check_token_ids(body.tokens, "tokens", model)
    text = await offload(len(body.tokens), lambda: model.tokenizer.decode(body.tokens, bool(body.skip_special_tokens)))
    return DetokenizeResponse(prompt=text)


@routes.post("/v1/chat/completions/render")
async def render_chat(body: ChatRequest, server: ServerDep, call: CallDep) -> RenderResponse:
    """What the chat template makes of the messages, without an answer."""
    model = server.model_named(body.model).text
    note_unknown_fields(body, call, strict=server.settings.strict_fields)
    text = await offload(num_message_chars(body), lambda: render(body, model).text)
    tokens = await offload(len(text), lambda: encode(text, "messages", model.tokenizer, add_special_tokens=False))
    return RenderResponse(prompt=text, prompt_token_ids=tokens, count=len(tokens))


@routes.post("/abort")
async def abort(body: AbortRequest, server: ServerDep, call: CallDep) -> AbortResponse:
    """End a running request of the same key."""
    server.abort(body.request_id, call.key)
    return AbortResponse(request_id=body.request_id, aborted=True)
