"""What several endpoints share: the base of all wire models, sampling fields, usage, errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field


class FirstFault(FailFast):
    """Check a list up to its first fault only: a million faults need no report each."""

    __hash__ = object.__hash__  # unions of annotated types need it on Python 3.11


TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], FirstFault()]
Strings = Annotated[list[str], FirstFault()]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class WireModel(BaseModel):
    """Strict about types: "1" is not 1, and true is not 1.0."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class RequestModel(WireModel):
    """A request body. Fields it does not know stay in `model_extra`; the door decides what becomes of them."""

    model_config = ConfigDict(extra="allow")


class ModelRequest(RequestModel):
    """A request that a model answers."""

    model: str | None = Field(None, description="A name from /v1/models; may be left out.")


class StreamOptions(WireModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = Field(None, description="One more chunk before [DONE] with the usage.")
    include_obfuscation: bool | None = Field(None, description="Refused when true: chunks carry no padding.")


class SamplingFields(ModelRequest):
    """The fields that completions and chat have in common: OpenAI's, then those of other servers."""

    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, description="Token id → −100 … 100.")
    n: int | None = Field(None, ge=1, le=128)
    seed: Seed | None = None
    stop: Annotated[str | Strings | None, Field(union_mode="left_to_right")] = Field(
        None, description="Up to four strings that end the answer; they are not part of it."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    user: str | None = Field(None, description="Accepted; has no effect on the answer.")

    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 or −1: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    min_tokens: int | None = Field(None, ge=0, description="No stop before this many tokens.")
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="Default true.")
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    bad_words: Strings | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep the last so many tokens of the prompt; −1: as many as fit."
    )
    add_special_tokens: bool | None = Field(None, description="BOS before the prompt: default true, in chat false.")
    return_token_ids: bool | None = None
    priority: int | None = Field(
        None,
        ge=-(2**31),
        le=2**31 - 1,
        description="Only 0, but with --scheduling-policy priority: the lower goes first.",
    )
    timeout: float | None = Field(
        None, gt=0, description="Seconds from its arrival after which the request ends with a 504."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Cached prefixes are shared only within one salt."
    )
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")
    return_timings: bool | None = Field(None, description="Adds a `timings` object to the response.")


class PromptTokensDetails(WireModel):
    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(WireModel):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(WireModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class Timings(WireModel):
    """Of one response, in seconds since the request arrived."""

    tokenize_seconds: float
    first_token_seconds: float | None
    total_seconds: float


class PromptLogprob(WireModel):
    """One candidate at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ErrorDetail(WireModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(WireModel):
    error: ErrorDetail


class ModelCard(WireModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(WireModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


JsonObject = dict[str, Any]
