"""The field tables of docs/api.md, made from the wire models:

python -m server.protocol.table > /tmp/tables.md
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from server.protocol.anthropic import CountTokensRequest, MessagesRequest
from server.protocol.chat import ChatRequest
from server.protocol.common import RequestModel
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.native import BatchRequest, GenerateRequest
from server.protocol.responses import InputFields, ResponsesRequest
from server.protocol.tokens import AbortRequest, DetokenizeRequest, TokenizeRequest

ENDPOINTS: tuple[tuple[str, type[RequestModel]], ...] = (
    ("POST /v1/completions", CompletionRequest),
    ("POST /v1/chat/completions, /v1/chat/completions/render", ChatRequest),
    ("POST /v1/embeddings", EmbeddingRequest),
    ("POST /v1/responses", ResponsesRequest),
    ("POST /v1/responses/input_tokens", InputFields),
    ("POST /v1/messages", MessagesRequest),
    ("POST /v1/messages/count_tokens", CountTokensRequest),
    ("POST /generate, /generate/stream", GenerateRequest),
    ("POST /generate/batch", BatchRequest),
    ("POST /tokenize", TokenizeRequest),
    ("POST /detokenize", DetokenizeRequest),
    ("POST /abort", AbortRequest),
)


def status(field: FieldInfo) -> str:
    """What becomes of a field: supported, in part, refused (400 that names it) or ignored. From how its description
    begins."""
    text = field.description or ""
    if text.startswith("Refused:") or text in ("Refused.", "Refused unless empty."):
        return "refused"
    if text.startswith(("Only ", "Refused ")):
        return "in part"
    return "ignored" if text.startswith("Accepted") else "supported"


def table(model: type[RequestModel]) -> Iterator[str]:
    """A Markdown table with a line a field."""
    yield "| field | status | note |"
    yield "|---|---|---|"
    for name, field in model.model_fields.items():
        required = "Required. " if field.is_required() else ""
        note = (required + (field.description or "")).strip().replace("|", "\\|")
        yield f"| `{name}` | {status(field)} | {note} |"


def tables() -> str:
    """All of them, under their endpoints."""
    sections = ["\n".join([f"### {title}", "", *table(model)]) for title, model in ENDPOINTS]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    print(tables(), end="")  # noqa: T201
