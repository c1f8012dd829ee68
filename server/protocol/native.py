"""Wire models of the native API: /generate, /generate/stream, /generate/batch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from server.protocol.common import RequestModel, SamplingFields, TokenIds, WireModel


def _false(value: bool) -> bool:
    if value:
        raise ValueError("only false")
    return value


# Not Literal[False], which takes 0, too.
OnlyFalse = Annotated[bool, AfterValidator(_false), Field(json_schema_extra={"const": False})]


class GenerateRequest(SamplingFields):
    prompt: Annotated[str | TokenIds, Field(union_mode="left_to_right")] = Field(description="A string or token ids.")
    max_tokens: int | None = Field(None, ge=0, description="Default 128.")
    n: int | None = Field(None, ge=1, le=1, description="Only 1.")
    stream: OnlyFalse | None = Field(None, description="/generate/stream streams.")
    stream_options: None = Field(None, description="Refused: the last event has the totals anyway.")
    prompt_logprobs: None = Field(None, description="Refused: /v1/completions has them.")
    return_token_ids: bool | None = Field(None, description="Accepted; the ids are always there.")
    return_timings: bool | None = Field(None, description="Accepted; the times are always there.")


class GenerateResponse(WireModel):
    """An answer with its totals; also the last event of a stream, where `done` is true."""

    id: str
    model: str
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_seconds: float | None
    latency_seconds: float


class GenerateEvent(WireModel):
    """One token of a stream. `text` is what it completes, maybe nothing: the texts add up to the answer."""

    text: str
    token_id: int
    position: int
    logprob: float


class BatchRequest(RequestModel):
    requests: list[GenerateRequest] = Field(min_length=1)


class BatchResponse(WireModel):
    """Answers in the order of the requests; one that failed is an object with `error`."""

    responses: list[GenerateResponse | dict[str, object]]
