"""Wire models of /tokenize, /detokenize, rendering and abort."""

from __future__ import annotations

from pydantic import Field

from server.protocol.chat import Messages, TemplateFields
from server.protocol.common import RequestModel, TokenIds, WireModel


class TokenizeRequest(TemplateFields):
    model: str | None = None
    messages: Messages | None = Field(None, min_length=1)  # type: ignore[assignment]  # one of the two
    prompt: str | None = Field(None, description="Text, where there are no messages.")
    add_special_tokens: bool | None = Field(None, description="BOS before the text: default true, with messages false.")
    return_token_strs: bool | None = None


class TokenizeResponse(WireModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = Field(None, description="Default false.")


class DetokenizeResponse(WireModel):
    prompt: str


class RenderResponse(WireModel):
    """The prompt that a chat request would be answered from."""

    prompt: str
    prompt_token_ids: list[int]
    count: int


class AbortRequest(RequestModel):
    request_id: str = Field(min_length=1, max_length=200, description="A response's id, or its x-request-id.")


class AbortResponse(WireModel):
    request_id: str
    aborted: bool
