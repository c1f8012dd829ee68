"""Wire models of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from server.protocol.common import (
    FirstFault,
    PromptLogprobs,
    SamplingFields,
    Strings,
    Timings,
    TokenIds,
    Usage,
    WireModel,
)
from server.protocol.constraints import ConstraintFields

Prompt = Annotated[
    str | TokenIds | Strings | Annotated[list[TokenIds], FirstFault()], Field(union_mode="left_to_right")
]


class CompletionRequest(SamplingFields, ConstraintFields):
    prompt: Prompt | None = Field(description="A string, strings, token ids, or lists of token ids.")
    best_of: int | None = Field(None, ge=0, le=20, description="Draw so many, return the n most likely.")
    echo: bool | None = Field(None, description="The prompt comes before the answer.")
    logprobs: int | None = Field(None, ge=0, le=5)
    max_tokens: int | None = Field(None, ge=0, description="Default 16.")
    suffix: str | None = Field(None, description="Fill in the middle, where the model can.")


class CompletionLogprobs(WireModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(WireModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "content_filter"] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(WireModel):
    """The whole answer, and each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None
