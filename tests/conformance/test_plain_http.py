"""Plain HTTP: every answer is exactly what the server's own description says, and streams keep every token apart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from server.protocol.anthropic import CountTokensResponse, Message
from server.protocol.chat import ChatChunk, ChatResponse
from server.protocol.common import ErrorResponse, ModelCard, ModelList
from server.protocol.completions import CompletionResponse
from server.protocol.embeddings import EmbeddingResponse
from server.protocol.native import BatchResponse, GenerateEvent, GenerateResponse
from server.protocol.responses import InputTokensResponse, ResponseObject
from server.protocol.tokens import DetokenizeResponse, RenderResponse, TokenizeResponse
from server.text.detokenizer import Detokenizer
from server.text.loading import load_tokenizer
from tests.conformance.conftest import MODEL
from tests.e2e.live import LiveServer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "seed": 1}
EVERYTHING: dict[str, Any] = {
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "return_timings": True,
    "service_tier": "auto",
}
TEXT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 4, "seed": 1}
WITH_ALL: dict[str, Any] = {**TEXT, "n": 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1, "return_timings": True}


@pytest.fixture(scope="module")
def http(fake_server: LiveServer) -> Iterator[httpx.Client]:
    with fake_server.http() as client:
        yield client


def as_described(model: type[BaseModel], data: str | bytes) -> Any:
    """The JSON, which must be what the model parses strictly, without a field that the model does not know."""
    parsed = json.loads(data)
    assert model.model_validate_json(data, strict=True).model_dump(mode="json", exclude_unset=True) == parsed
    return parsed


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[tuple[str | None, str]]:
    """(name, data) of each event, from bytes that hold nothing but events."""
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in response.headers
        raw = response.read().decode()
    assert "\r" not in raw
    assert raw.endswith("\n\n")
    for event in raw.removesuffix("\n\n").split("\n\n"):
        lines = event.split("\n")
        assert [line.partition(": ")[0] for line in lines] in (["data"], ["event", "data"]), event
        yield (lines[0][7:] if len(lines) == 2 else None), lines[-1][6:]


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/chat/completions", CHAT, ChatResponse),
        ("/v1/chat/completions", CHAT | EVERYTHING, ChatResponse),
        ("/v1/completions", TEXT, CompletionResponse),
        ("/v1/completions", WITH_ALL, CompletionResponse),
        ("/v1/embeddings", {"input": ["a", "b"]}, EmbeddingResponse),
        ("/v1/embeddings", {"input": [1, 2], "encoding_format": "base64"}, EmbeddingResponse),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}, ResponseObject),
        ("/v1/responses/input_tokens", {"input": "Hello"}, InputTokensResponse),
        ("/v1/messages", CHAT, Message),
        ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}, CountTokensResponse),
        ("/generate", TEXT, GenerateResponse),
        ("/generate/batch", {"requests": [TEXT, TEXT]}, BatchResponse),
        ("/tokenize", {"prompt": "Hello", "return_token_strs": True}, TokenizeResponse),
        ("/detokenize", {"tokens": [1, 2, 3]}, DetokenizeResponse),
        ("/v1/chat/completions/render", {"messages": CHAT["messages"]}, RenderResponse),
    ],
)
def test_an_answer_is_what_is_described(
    http: httpx.Client, path: str, body: dict[str, Any], model: type[BaseModel]
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    as_described(model, response.content)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]


def test_the_models_are_what_is_described(http: httpx.Client) -> None:
    as_described(ModelList, http.get("/v1/models").content)
    as_described(ModelCard, http.get(f"/v1/models/{MODEL}").content)


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/chat/completions", CHAT, ChatChunk),
        ("/v1/chat/completions", CHAT | EVERYTHING | {"stream_options": {"include_usage": True}}, ChatChunk),
        ("/v1/completions", TEXT, CompletionResponse),
        ("/v1/completions", WITH_ALL | {"stream_options": {"include_usage": True}}, CompletionResponse),
    ],
)
def test_the_chunks_of_a_stream_are_what_is_described(
    http: httpx.Client, path: str, body: dict[str, Any], model: type[BaseModel]
) -> None:
    *chunks, (_, done) = events(http, path, body | {"stream": True})
    assert done == "[DONE]"
    heads = set()
    for name, data in chunks:
        assert name is None
        chunk = as_described(model, data)
        heads.add((chunk["id"], chunk["object"], chunk["created"], chunk["model"], chunk["system_fingerprint"]))
    assert len(heads) == 1


def test_the_events_of_the_plain_api_are_what_is_described(http: httpx.Client) -> None:
    *tokens, (_, last) = [(name, data) for name, data in events(http, "/generate/stream", TEXT) if data != "[DONE]"]
    positions = [as_described(GenerateEvent, data)["position"] for _, data in tokens]
    assert positions == [0, 1, 2, 3]
    total = json.loads(last)
    assert total.pop("done") is True
    as_described(GenerateResponse, json.dumps(total))


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b'{"messages": []}', 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "model": "none"}', 404),
        ("POST", "/v1/nothing", b"{}", 404),
        ("GET", "/v1/completions", b"", 405),
        ("DELETE", "/v1/models", b"", 405),
    ],
)
def test_errors_have_one_shape(http: httpx.Client, method: str, path: str, body: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    response = http.request(method, path, content=body, headers=headers)
    assert response.status_code == status
    as_described(ErrorResponse, response.content)


def test_bodies_that_are_not_json_by_their_header_are_refused(http: httpx.Client) -> None:
    response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert response.status_code == 415
    as_described(ErrorResponse, response.content)


async def test_every_token_has_a_chunk_of_its_own(fake_server: LiveServer, default_model_path: Path) -> None:
    """Also while the engine is ahead of the server: tokens share a chunk only where they share a character."""
    tokenizer = load_tokenizer(default_model_path).tokenizer
    limits = httpx.Limits(max_connections=None)

    async def chunks(http: httpx.AsyncClient, seed: int) -> list[list[int]]:
        body = {"prompt": "a", "max_tokens": 150, "ignore_eos": True, "return_token_ids": True, "seed": seed}
        response = await http.post("/v1/completions", json=body | {"stream": True})
        data = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
        return [json.loads(line)["choices"][0].get("token_ids", []) for line in data]

    async with httpx.AsyncClient(base_url=fake_server.url, timeout=60, limits=limits) as http:
        answers = await asyncio.gather(*[chunks(http, seed) for seed in range(64)])
    for answer in answers:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, starts_text=False)
        assert sum(map(len, answer)) == 150
        for token_ids in answer:
            for token_id in token_ids[:-1]:
                detokenizer.push(token_id)
                assert detokenizer.pending
            for token_id in token_ids[-1:]:
                detokenizer.push(token_id)
