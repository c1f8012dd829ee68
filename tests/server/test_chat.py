"""/v1/chat/completions: shapes, order, templates, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.protocol.chat import ChatChunk, ChatResponse
from tests.server.toy import ToyEngine, saying, toy_server

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


async def prompt_of(**fields: Any) -> str:
    """The text that a chat request makes the engine read."""
    async with toy_server() as toy:
        response = await toy.post(PATH, fields)
        assert response.status_code == 200, response.text
        tokens = toy.engine.requests[0].prompt_token_ids
        model = toy.server.model
        assert model is not None
        return model.text.tokenizer.decode(tokens, skip_special_tokens=False)


async def test_an_answer_has_the_shape_of_the_api() -> None:
    async with toy_server(ToyEngine(saying("Hello"), num_cached_tokens=2)) as toy:
        body = (await toy.post(PATH, messages=HI)).json()
    ChatCompletion.model_validate(body, strict=True)
    ChatResponse.model_validate(body)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 6


async def test_a_stream_begins_with_the_role_of_each_choice_in_order() -> None:
    def script(request: Any, choice: int) -> list[int]:
        return [*(b"ab" if choice == 0 else b"z"), 258]

    async with toy_server(ToyEngine(script)) as toy:
        chunks = await toy.events(PATH, messages=HI, n=2)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        ChatChunk.model_validate(chunk)
    told = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]) for chunk in chunks]
    role = {"role": "assistant", "content": "", "refusal": None}
    assert told == [
        (0, role),
        (1, role),
        (0, {"content": "a"}),
        (1, {"content": "z"}),
        (0, {"content": "b"}),
        (1, {}),
        (0, {}),
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 5 + ["stop", "stop"]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


async def test_include_usage_adds_one_chunk_with_the_totals() -> None:
    async with toy_server(ToyEngine(saying("Hi"))) as toy:
        chunks = await toy.events(PATH, messages=HI, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "audio_tokens": 0}


async def test_logprobs_carry_the_true_bytes_of_each_token() -> None:
    async with toy_server(ToyEngine(saying("é"))) as toy:
        fields: dict[str, Any] = {"messages": HI, "logprobs": True, "top_logprobs": 1, "max_tokens": 2}
        body = (await toy.post(PATH, fields)).json()
        chunks = await toy.events(PATH, **fields)
    expected = [
        {"token": "\\xc3", "logprob": -0.25, "bytes": [0xC3]},
        {"token": "\\xa9", "logprob": -0.25 - 1 / 1024, "bytes": [0xA9]},
    ]
    expected = [{**token, "top_logprobs": [token]} for token in expected]
    assert body["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    ChatCompletion.model_validate(body, strict=True)
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("content") for choice in streamed] == ["", "é", None]
    assert streamed[1]["logprobs"] == {"content": expected, "refusal": None}


async def test_without_top_logprobs_the_lists_of_alternatives_are_empty() -> None:
    async with toy_server(ToyEngine(saying("a"))) as toy:
        body = (await toy.post(PATH, messages=HI, logprobs=True, max_tokens=1)).json()
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_messages_go_through_the_template() -> None:
    prompt = await prompt_of(messages=[{"role": "system", "content": "Be brief."}, *HI])
    assert prompt == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    assert "<|im_start|>system\nx" in await prompt_of(messages=[{"role": "developer", "content": "x"}])


async def test_results_are_told_by_the_user_where_the_template_has_no_role_for_them() -> None:
    messages = [*HI, {"role": "tool", "content": "42", "tool_call_id": "c1"}, {"role": "function", "content": "43"}]
    prompt = await prompt_of(messages=messages)
    told = "<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response>"
    assert f"<|im_start|>user\n{told}<|im_end|>" in prompt


async def test_content_parts_are_joined_by_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "<|im_start|>user\none\ntwo<|im_end|>" in await prompt_of(messages=[{"role": "user", "content": parts}])


async def test_a_final_message_is_continued_on_request() -> None:
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    assert (await prompt_of(messages=messages, continue_final_message=True)).endswith("<|im_start|>assistant\nWell,")
    assert (await prompt_of(messages=messages)).endswith("Well,<|im_end|>\n<|im_start|>assistant\n")
    async with toy_server() as toy:
        both = await toy.post(PATH, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400


async def test_the_answer_may_take_the_rest_of_the_context() -> None:
    async with toy_server() as toy:
        await toy.post(PATH, messages=HI)
        await toy.post(PATH, messages=HI, max_tokens=5, max_completion_tokens=7)
        await toy.post(PATH, messages=HI, max_tokens=5)
    num_prompt_tokens = len(toy.engine.requests[0].prompt_token_ids)
    limits = [request.sampling.max_tokens for request in toy.engine.requests]
    assert limits == [256 - num_prompt_tokens, 7, 5]


async def test_a_requests_own_template_only_where_the_operator_allows_it() -> None:
    fields = {
        "messages": HI,
        "chat_template": "[{{ messages[0].content }}{{ mood }}]",
        "chat_template_kwargs": {"mood": "!"},
    }
    async with toy_server() as toy:
        refused = await toy.post(PATH, fields)
    assert refused.json()["error"]["param"] == "chat_template"
    async with toy_server(trust_request_chat_template=True) as toy:
        await toy.post(PATH, fields)
        broken = await toy.post(PATH, fields | {"chat_template": "{% for %}"})
    assert bytes(toy.engine.requests[0].prompt_token_ids) == b"[hi!]"
    assert broken.json()["error"]["param"] == "chat_template"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "nonsense"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"verbosity": "low"}, "verbosity"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": "hi"}, "messages"),
    ],
)
async def test_what_is_not_done_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    async with toy_server() as toy:
        response = await toy.post(PATH, {"messages": HI} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert toy.engine.requests == []


async def test_harmless_fields_are_taken() -> None:
    async with toy_server() as toy:
        response = await toy.post(
            PATH,
            messages=HI,
            user="u",
            store=False,
            metadata={"a": "b"},
            service_tier="auto",
            safety_identifier="s",
            prompt_cache_key="k",
            parallel_tool_calls=True,
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            modalities=["text"],
            verbosity="medium",
            reasoning_effort="low",
            prediction={"type": "content", "content": "x"},
        )
    assert response.status_code == 200
    assert "x-ignored-fields" not in response.headers
    assert response.json()["service_tier"] == "default"


async def test_a_model_without_template_says_where_to_go() -> None:
    async with toy_server() as toy:
        model = toy.server.model
        assert model is not None
        from dataclasses import replace

        toy.server.model = replace(model, text=replace(model.text, chat_template=None))
        response = await toy.post(PATH, messages=HI)
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]


async def test_token_ids_on_request() -> None:
    async with toy_server(ToyEngine(saying("H"))) as toy:
        body = (await toy.post(PATH, messages=HI, return_token_ids=True, prompt_logprobs=0)).json()
        chunks = await toy.events(PATH, messages=HI, return_token_ids=True)
    prompt = list(toy.engine.requests[0].prompt_token_ids)
    assert body["prompt_token_ids"] == prompt
    assert body["choices"][0]["token_ids"] == [72, 258]
    assert len(body["prompt_logprobs"]) == len(prompt)
    assert body["prompt_logprobs"][0] is None
    assert chunks[0]["prompt_token_ids"] == prompt
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == [72, 258]
