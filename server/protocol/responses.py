"""Wire models of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from server.protocol.common import FirstFault, JsonObject, ModelRequest, WireModel


class InputPart(WireModel):
    """A piece of content: input_text, output_text or refusal; other kinds are refused by their name."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(WireModel):
    """A message, a call of a function or its result; reasoning is left out. Others are refused by their name."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Annotated[str | list[InputPart] | None, Field(union_mode="left_to_right")] = None
    call_id: str | None = None  # of function_call and function_call_output
    name: str | None = None
    arguments: str | None = None
    output: Annotated[str | list[InputPart] | None, Field(union_mode="left_to_right")] = None


class InputFields(ModelRequest):
    input: Annotated[str | Annotated[list[InputItem], FirstFault()], Field(union_mode="left_to_right")]
    instructions: str | None = None
    tools: list[JsonObject] | None = Field(None, max_length=128, description="Functions; other types are refused.")
    tool_choice: str | JsonObject | None = Field(
        None, description="none, auto, required, a function by its name, or allowed_tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="Default true: an answer may hold several calls.")
    previous_response_id: str | None = Field(None, description="Refused: nothing is stored.")
    conversation: str | JsonObject | None = Field(None, description="Refused: nothing is stored.")
    text: JsonObject | None = Field(
        None, description="format: text, json_object or json_schema (enforced, strict or not)."
    )
    reasoning: JsonObject | None = Field(None, description="`effort` is handed to the chat template.")
    truncation: Literal["auto", "disabled"] | None = Field(None, description="Only disabled.")


class ResponsesRequest(InputFields):
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[str] | None = Field(None, description="Only message.output_text.logprobs.")
    stream: bool | None = None
    stream_options: JsonObject | None = Field(None, description="Refused with include_obfuscation: true.")
    store: bool | None = Field(None, description="Nothing is stored; the response says store: false.")
    background: bool | None = Field(None, description="Refused when true.")
    metadata: dict[str, str] | None = Field(None, max_length=16, description="Given back with the response.")
    max_tool_calls: int | None = Field(None, description="Accepted; all tools are the client's own.")
    prompt: JsonObject | None = Field(None, description="Refused: no prompts are stored.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = Field(
        None, description="Only auto or default."
    )
    user: str | None = Field(None, description="Accepted; has no effect on the answer.")
    safety_identifier: str | None = Field(None, description="Accepted; has no effect on the answer.")
    prompt_cache_key: str | None = Field(None, description="Accepted; the prefix cache needs no key.")
    prompt_cache_options: JsonObject | None = Field(None, description="Accepted; the prefix cache is always on.")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="Refused when 24h: the cache lives in memory."
    )
    moderation: JsonObject | None = Field(None, description="Refused.")
    context_management: list[JsonObject] | None = Field(None, description="Refused.")


class ResponsesUsage(WireModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class OutputText(WireModel):
    type: Literal["output_text"]
    text: str
    annotations: list[JsonObject]
    logprobs: list[JsonObject]


class OutputMessage(WireModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(WireModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(WireModel):
    id: str
    type: Literal["reasoning"]
    summary: list[JsonObject]
    content: list[ReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]


class OutputCall(WireModel):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseObject(WireModel):
    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "in_progress", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_p: float
    usage: ResponsesUsage | None


class InputTokensResponse(WireModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
