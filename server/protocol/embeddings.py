"""Wire models of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from server.protocol.common import FirstFault, ModelRequest, Strings, TokenIds, WireModel

Input = Annotated[str | TokenIds | Strings | Annotated[list[TokenIds], FirstFault()], Field(union_mode="left_to_right")]


class EmbeddingRequest(ModelRequest):
    input: Input = Field(description="A string, strings, token ids, or lists of token ids.")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="Default float.")
    dimensions: int | None = Field(None, ge=1, description="Keep the first so many numbers, normalised again.")
    user: str | None = Field(None, description="Accepted; has no effect on the answer.")
    pooling: Literal["mean", "last"] | None = Field(None, description="Over all tokens, or the last. Default mean.")
    add_special_tokens: bool | None = Field(None, description="BOS before the text: default true.")
    truncate_prompt_tokens: int | None = Field(None, ge=-1, description="Keep the last so many tokens.")
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")


class Embedding(WireModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(WireModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(WireModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
