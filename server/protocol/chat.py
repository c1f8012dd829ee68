"""Wire models of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from server.protocol.common import (
    FirstFault,
    JsonObject,
    PromptLogprobs,
    RequestModel,
    SamplingFields,
    Timings,
    Usage,
    WireModel,
)
from server.protocol.constraints import ConstraintFields


class ContentPart(WireModel):
    """A piece of a message. Only text can be served: other kinds are refused by their name."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(WireModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[ContentPart] | None, Field(union_mode="left_to_right")] = None
    name: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[JsonObject] | None = None
    function_call: JsonObject | None = None
    audio: JsonObject | None = None


Messages = Annotated[list[ChatMessage], FirstFault()]


class TemplateFields(RequestModel):
    """How messages become a prompt."""

    messages: Messages = Field(min_length=1)
    add_generation_prompt: bool | None = Field(None, description="Default true.")
    continue_final_message: bool | None = Field(None, description="Go on with the last message instead of a new one.")
    chat_template: str | None = Field(None, description="Only with --trust-request-chat-template.")
    chat_template_kwargs: JsonObject | None = Field(None, description="More variables for the template.")
    documents: list[JsonObject] | None = Field(None, description="For templates that know documents.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Handed to the chat template; models that do not know it ignore it."
    )
    tools: list[JsonObject] | None = Field(None, max_length=128, description="Functions; other types are refused.")


class ChatRequest(SamplingFields, ConstraintFields, TemplateFields):
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1, description="Older name of max_completion_tokens, which wins.")

    tool_choice: str | JsonObject | None = Field(
        None, description="none, auto, required, a function by its name, or allowed_tools. Default auto, with tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="Default true: an answer may hold several calls.")
    functions: list[JsonObject] | None = Field(None, max_length=128, description="Older form of tools.")
    function_call: str | JsonObject | None = Field(None, description="Older form of tool_choice, for functions.")
    modalities: list[str] | None = Field(None, description="Only [text].")
    audio: JsonObject | None = Field(None, description="Refused.")
    web_search_options: JsonObject | None = Field(None, description="Refused.")
    moderation: JsonObject | None = Field(None, description="Refused.")
    prediction: JsonObject | None = Field(None, description="Accepted; has no effect on the answer.")
    store: bool | None = Field(None, description="Refused when true: nothing is stored.")
    metadata: dict[str, str] | None = Field(None, max_length=16, description="Accepted; has no effect on the answer.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = Field(
        None, description="Only auto or default."
    )
    safety_identifier: str | None = Field(None, description="Accepted; has no effect on the answer.")
    prompt_cache_key: str | None = Field(None, description="Accepted; the prefix cache needs no key.")
    prompt_cache_options: JsonObject | None = Field(None, description="Accepted; the prefix cache is always on.")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="Refused when 24h: the cache lives in memory."
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Only medium.")


class TopLogprob(WireModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(WireModel):
    content: list[TokenLogprob] | None
    refusal: None = None


class CalledFunction(WireModel):
    """In a stream the name comes first, the arguments, a JSON text, in pieces."""

    name: str | None = None
    arguments: str


class ToolCall(WireModel):
    index: int | None = None  # in a stream
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class AssistantMessage(WireModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None


class ChatChoice(WireModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "content_filter", "tool_calls", "function_call"]
    token_ids: list[int] | None = None


class ChatResponse(WireModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] | None = None
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    timings: Timings | None = None


class ChatDelta(WireModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None


class ChatChunkChoice(WireModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "content_filter", "tool_calls", "function_call"] | None
    token_ids: list[int] | None = None


class ChatChunk(WireModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    timings: Timings | None = None
