"""Wire models of Anthropic's /v1/messages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from server.protocol.common import FirstFault, JsonObject, ModelRequest, Strings, WireModel

JsonList = list[JsonObject]


class Block(WireModel):
    """A piece of content: text, tool_use, tool_result or thinking. Other kinds are refused by their name."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    id: str | None = None  # of tool_use
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None  # of tool_result
    content: JsonList | str | None = None


Blocks = Annotated[list[Block], FirstFault()]
Content = Annotated[str | Blocks, Field(union_mode="left_to_right")]


class InputMessage(WireModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["user", "assistant"]
    content: Content


class CountTokensRequest(ModelRequest):
    messages: Annotated[list[InputMessage], FirstFault()] = Field(min_length=1)
    system: Annotated[str | Blocks | None, Field(union_mode="left_to_right")] = None
    tools: list[JsonObject] | None = Field(
        None, max_length=128, description="Tools with an input_schema; those that a server would run are refused."
    )
    tool_choice: JsonObject | None = Field(None, description="auto, any, tool or none; disable_parallel_tool_use.")
    thinking: JsonObject | None = Field(None, description="Only {type: disabled}.")


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: Strings | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    metadata: JsonObject | None = Field(None, description="Accepted; has no effect on the answer.")
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="Accepted.")


class TextBlock(WireModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(WireModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class MessageUsage(WireModel):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class Message(WireModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class CountTokensResponse(WireModel):
    input_tokens: int
