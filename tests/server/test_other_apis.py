"""Embeddings, tokens, abort, the native API, Anthropic's messages, the Responses API."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from server.protocol.anthropic import Message
from server.protocol.native import GenerateEvent, GenerateResponse
from server.protocol.responses import ResponseObject
from tests.server.toy import ToyEngine, saying, toy_server

HI = [{"role": "user", "content": "hi"}]


def named_events(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """(event, data) of a stream of named events; checks that the names are those of the data."""
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        first, second = block.split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert data["type"] == first.removeprefix("event: ")
        events.append((data["type"], data))
    return events


# Embeddings


@pytest.mark.parametrize(("given", "count"), [("ab", 1), (["ab", "abc"], 2), ([97, 98], 1), ([[97], [98, 99]], 2)])
async def test_embeddings_are_unit_vectors_in_the_order_of_the_inputs(given: Any, count: int) -> None:
    async with toy_server() as toy:
        body = (await toy.post("/v1/embeddings", input=given)).json()
    CreateEmbeddingResponse.model_validate(body, strict=True)
    assert [item["index"] for item in body["data"]] == list(range(count))
    for item, request in zip(body["data"], toy.engine.requests, strict=True):
        raw = np.arange(4) + len(request.prompt_token_ids)
        assert item["embedding"] == pytest.approx(raw / np.linalg.norm(raw), abs=1e-6)
        assert request.sampling.max_tokens == 0
    assert body["usage"]["prompt_tokens"] == sum(len(request.prompt_token_ids) for request in toy.engine.requests)


async def test_base64_embeddings_are_little_endian_float32() -> None:
    async with toy_server() as toy:
        numbers = (await toy.post("/v1/embeddings", input="ab")).json()["data"][0]["embedding"]
        coded = (await toy.post("/v1/embeddings", input="ab", encoding_format="base64")).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == pytest.approx(numbers, abs=1e-7)


async def test_fewer_dimensions_are_unit_vectors_again() -> None:
    async with toy_server() as toy:
        body = (await toy.post("/v1/embeddings", input="ab", dimensions=2)).json()
        refused = await toy.post("/v1/embeddings", input="ab", dimensions=5)
    assert body["data"][0]["embedding"] == pytest.approx((np.array([2, 3]) / np.sqrt(13)).tolist(), abs=1e-6)
    assert refused.json()["error"]["param"] == "dimensions"


@pytest.mark.parametrize("given", ["", [""], [], [[]], ["a", ""], ["a"] * 5])
async def test_empty_or_too_many_inputs_are_refused(given: Any) -> None:
    async with toy_server(max_inputs=4) as toy:
        response = await toy.post("/v1/embeddings", input=given)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input"


# Tokens


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with toy_server() as toy:
        tokens = (await toy.post("/tokenize", prompt="ñ!", return_token_strs=True)).json()
        text = (await toy.post("/detokenize", tokens=tokens["tokens"])).json()
    assert tokens == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [0xC3, 0xB1, 33],
        "token_strs": ["\\xc3", "\\xb1", "!"],
    }
    assert text == {"prompt": "ñ!"}


async def test_messages_are_tokenized_through_the_template() -> None:
    async with toy_server() as toy:
        tokens = (await toy.post("/tokenize", messages=HI)).json()
        rendered = (await toy.post("/v1/chat/completions/render", messages=HI)).json()
        counted = (await toy.post("/v1/messages/count_tokens", messages=HI)).json()
        counted_too = (await toy.post("/v1/responses/input_tokens", input="hi")).json()
        neither = await toy.post("/tokenize", add_special_tokens=True)
        await toy.post("/v1/chat/completions", messages=HI)
    assert tuple(tokens["tokens"]) == toy.engine.requests[0].prompt_token_ids
    assert rendered["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered["prompt_token_ids"] == tokens["tokens"]
    assert counted == {"input_tokens": tokens["count"]}
    assert counted_too == {"object": "response.input_tokens", "input_tokens": tokens["count"]}
    assert neither.json()["error"]["param"] == "prompt"


async def test_detokenize_refuses_ids_outside_of_the_vocabulary() -> None:
    async with toy_server() as toy:
        assert (await toy.post("/detokenize", tokens=[300])).json()["error"]["param"] == "tokens"


# Abort


async def test_a_request_is_aborted_by_its_response_id_or_request_id() -> None:
    for known_as in ("cmpl-mine", "req-1"):
        running = asyncio.Event()
        engine = ToyEngine(saying("x" * 100), gate=lambda step: running.set() if step == 3 else None)  # noqa: B023
        async with toy_server(engine) as toy:
            headers = {"x-request-id": "req-1"}
            fields = {"prompt": "a", "max_tokens": 200, "request_id": "mine"}
            answer = asyncio.create_task(toy.http.post("/v1/completions", json=fields, headers=headers))
            await running.wait()
            aborted = await toy.post("/abort", request_id=known_as)
            response = await answer
            unknown = await toy.post("/abort", request_id=known_as)
        assert aborted.json() == {"request_id": known_as, "aborted": True}
        assert (response.status_code, response.json()["error"]["code"]) == (409, "request_aborted")
        assert response.headers["x-should-retry"] == "false"
        assert unknown.status_code == 404
        assert engine.open == {}


async def test_a_key_cannot_abort_the_requests_of_another() -> None:
    running = asyncio.Event()
    engine = ToyEngine(saying("x" * 100), gate=lambda step: running.set() if step == 3 else None)
    async with toy_server(engine, api_key=("a=one", "b=two")) as toy:
        body = {"prompt": "a", "max_tokens": 200, "request_id": "mine"}
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        answer = asyncio.create_task(toy.http.post("/v1/completions", json=body, headers=one))
        await running.wait()
        refused = await toy.http.post("/abort", json={"request_id": "cmpl-mine"}, headers=two)
        assert refused.status_code == 404
        assert (await answer).status_code == 200


# The native API


async def test_native_generate() -> None:
    async with toy_server(ToyEngine(saying("Hi"), num_cached_tokens=1)) as toy:
        body = (await toy.post("/generate", prompt="ab")).json()
    GenerateResponse.model_validate(body)
    assert (body["text"], body["token_ids"], body["finish_reason"]) == ("Hi", [72, 105, 258], "stop")
    assert (body["prompt_tokens"], body["cached_tokens"], body["completion_tokens"]) == (2, 1, 3)
    assert 0 < body["first_token_seconds"] <= body["latency_seconds"]


@pytest.mark.parametrize(("field", "value"), [("stream", 0), ("stream", True), ("n", True), ("n", 2), ("n", 1.0)])
async def test_native_fields_that_take_one_value_take_no_other(field: str, value: object) -> None:
    """Found by schemathesis: 0 passed for false, and true for 1."""
    async with toy_server() as toy:
        refused = await toy.post("/generate", {"prompt": "ab", field: value})
        batch = await toy.post("/generate/batch", {"requests": [{"prompt": "ab", field: value}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert batch.status_code == 400


async def test_native_stream_tells_each_token_and_ends_with_the_totals() -> None:
    async with toy_server(ToyEngine(saying("é!"))) as toy:
        response = await toy.post("/generate/stream", prompt="ab")
    events = [json.loads(block.removeprefix("data: ")) for block in response.text.split("\n\n")[:-1]]
    for event in events[:-1]:
        GenerateEvent.model_validate(event)
    assert [(event["position"], event["token_id"], event["text"]) for event in events[:-1]] == [
        (0, 0xC3, ""),
        (1, 0xA9, "é"),
        (2, 33, "!"),
        (3, 258, ""),
    ]
    assert events[0]["logprob"] == -0.25
    assert events[-1]["done"] is True
    assert (events[-1]["text"], events[-1]["completion_tokens"]) == ("é!", 4)


async def test_native_batch_answers_each_request_or_says_why_not() -> None:
    async with toy_server(ToyEngine(saying("Hi")), max_prompts=3) as toy:
        requests = [{"prompt": "a"}, {"prompt": ""}, {"prompt": "b", "max_tokens": 1}]
        responses = (await toy.post("/generate/batch", requests=requests)).json()["responses"]
        too_many = await toy.post("/generate/batch", requests=requests * 2)
    assert [response.get("text") for response in responses] == ["Hi", None, "H"]
    assert responses[1]["error"]["param"] == "prompt"
    assert too_many.json()["error"]["param"] == "requests"


# Anthropic's messages


async def test_an_anthropic_message_has_its_shape() -> None:
    async with toy_server(ToyEngine(saying("Hello"), num_cached_tokens=4)) as toy:
        fields = {"model": "toy", "max_tokens": 20, "system": [{"type": "text", "text": "Be brief."}], "messages": HI}
        body = (await toy.post("/v1/messages", fields)).json()
    Message.model_validate(body)
    prompt = bytes(token for token in toy.engine.requests[0].prompt_token_ids if token < 256)
    assert prompt == b"system\nBe brief.\nuser\nhi\nassistant\n"
    assert body["content"] == [{"type": "text", "text": "Hello"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"] == {
        "input_tokens": len(toy.engine.requests[0].prompt_token_ids) - 4,
        "output_tokens": 6,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
    }


async def test_an_anthropic_stream_has_its_events_in_order() -> None:
    async with toy_server(ToyEngine(saying("Hi|"))) as toy:
        fields = {"max_tokens": 20, "messages": HI, "stream": True, "stop_sequences": ["|"]}
        events = named_events(await toy.post("/v1/messages", fields))
    assert [name for name, _ in events] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta") == "Hi"
    assert events[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "|"}
    assert events[-2][1]["usage"]["output_tokens"] == 3


async def test_an_anthropic_conversation_that_ends_with_the_assistant_is_continued() -> None:
    async with toy_server() as toy:
        await toy.post("/v1/messages", max_tokens=5, messages=[*HI, {"role": "assistant", "content": "Well,"}])
    assert bytes(toy.engine.requests[0].prompt_token_ids[-5:]) == b"Well,"


async def test_anthropic_errors_have_their_own_types_beside_the_common_keys() -> None:
    async with toy_server(api_key=("k",)) as toy:
        key = {"x-api-key": "k"}
        unauthorized = await toy.post("/v1/messages", max_tokens=5, messages=HI)
        missing = await toy.http.post("/v1/messages", json={"messages": HI}, headers=key)
        unknown = await toy.http.post("/v1/messages", json={"messages": HI, "max_tokens": 5, "model": "x"}, headers=key)
        tools = await toy.http.post(
            "/v1/messages", json={"messages": HI, "max_tokens": 5, "tools": [{"type": "bash_20250124"}]}, headers=key
        )
    told = [(r.status_code, r.json()["type"], r.json()["error"]["type"]) for r in (unauthorized, missing, unknown)]
    assert told == [
        (401, "error", "authentication_error"),
        (400, "error", "invalid_request_error"),
        (404, "error", "not_found_error"),
    ]
    assert tools.json()["error"]["param"] == "tools[0]"


# The Responses API


async def test_a_response_has_the_shape_of_the_api() -> None:
    async with toy_server(ToyEngine(saying("Hello"), num_cached_tokens=3)) as toy:
        body = (await toy.post("/v1/responses", input="hi", instructions="Be brief.", metadata={"a": "b"})).json()
    parsed = OpenAIResponse.model_validate(body)
    ResponseObject.model_validate(body)
    assert parsed.output_text == "Hello"
    assert (parsed.status, parsed.metadata) == ("completed", {"a": "b"})
    assert parsed.usage is not None
    assert parsed.usage.input_tokens_details.cached_tokens == 3
    prompt = bytes(token for token in toy.engine.requests[0].prompt_token_ids if token < 256)
    assert prompt == b"system\nBe brief.\nuser\nhi\nassistant\n"


async def test_a_response_cut_short_is_incomplete() -> None:
    async with toy_server(ToyEngine(saying("Hello"))) as toy:
        body = (await toy.post("/v1/responses", input="hi", max_output_tokens=2)).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_a_streamed_response_has_its_events_in_order_with_rising_numbers() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes?"}]},
        {"role": "user", "content": "go on"},
    ]
    async with toy_server(ToyEngine(saying("Hi"))) as toy:
        events = named_events(await toy.post("/v1/responses", input=items, stream=True, top_logprobs=1))
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for _, data in events:
        adapter.validate_python(data)
    assert [name.removeprefix("response.") for name, _ in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert "".join(data["delta"] for name, data in events if name.endswith("delta")) == "Hi"
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == "Hi"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": "x" * 300}, "input"),
    ],
)
async def test_what_responses_do_not_do_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    async with toy_server() as toy:
        response = await toy.post("/v1/responses", {"input": "hi"} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
