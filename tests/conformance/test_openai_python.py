"""The openai package for Python: every endpoint that is offered, and what is not is refused in its own terms."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from tests.conformance.conftest import MODEL
from tests.conformance.strict import checked
from tests.e2e.live import LiveServer

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "developer", "content": "You answer questions."},
    {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
TOKEN_FIELDS = ("choices[].token_ids", "prompt_token_ids")


@pytest.fixture
def client(live_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=live_server.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def scripted(fake_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=fake_server.base_url, api_key="none", max_retries=0) as client:
        yield client


# Chat


def test_chat(client: OpenAI) -> None:
    answer = checked(client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY))
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.system_fingerprint
    [choice] = answer.choices
    assert choice.message.content is not None
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_the_chunks_of_a_chat(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = [checked(chunk) for chunk in stream]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    first, *middle, end, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in middle] == [None] * len(middle)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert end.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert _text(chunks) == whole.choices[0].message.content
    assert usage.usage is not None
    assert whole.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens


def _text(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_without_include_usage_no_chunk_speaks_of_it(scripted: OpenAI) -> None:
    stream = scripted.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3, stream=True)
    for chunk in stream:
        assert "usage" not in checked(chunk).model_fields_set
        assert chunk.choices


def test_logprobs_of_several_choices(client: OpenAI) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    answer = checked(client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content
        spoken = b"".join(bytes(token.bytes or ()) for token in content).decode("utf-8", "ignore")
        assert spoken.removesuffix("<|im_end|>") == choice.message.content
        for token in content:
            assert len(token.top_logprobs) == 3
            assert -9999 <= token.logprob <= 0
            assert token.top_logprobs == sorted(token.top_logprobs, key=lambda top: -top.logprob)
            assert token.top_logprobs[0].logprob >= token.logprob
    again = client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)
    assert [choice.message.content for choice in again.choices] == [c.message.content for c in answer.choices]
    chunks = [checked(c) for c in client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **fields)]
    assert [chunk.choices[0].index for chunk in chunks[:3]] == [0, 1, 2]
    for choice in answer.choices:
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert [part.finish_reason for part in mine if part.finish_reason] == [choice.finish_reason]
        streamed = [token for part in mine if part.logprobs for token in part.logprobs.content or ()]
        assert choice.logprobs is not None
        assert streamed == choice.logprobs.content


def test_the_stream_helper(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=1, **GREEDY)
    with client.chat.completions.stream(
        model=MODEL,
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=1,
        stream_options={"include_usage": True},
        **GREEDY,
    ) as stream:
        events = list(stream)
        final = checked(stream.get_final_completion())
    assert {event.type for event in events} == {
        "chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done",
    }  # fmt: skip
    [done] = [event for event in events if event.type == "content.done"]
    assert done.content == whole.choices[0].message.content
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].logprobs == whole.choices[0].logprobs
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_stop_strings_and_prefill(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY).choices[0].message.content
    assert whole is not None
    stop = whole[6:10]
    fields = {**GREEDY, "stop": [stop, "@@"]}
    answer = checked(client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields))
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    begun: list[ChatCompletionMessageParam] = [*MESSAGES, {"role": "assistant", "content": whole[:12]}]
    rest = client.chat.completions.create(
        model=MODEL,
        messages=begun,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
        **GREEDY,
    )
    assert rest.choices[0].message.content
    assert not rest.choices[0].message.content.startswith(whole[:12])


def test_every_sampling_field_of_the_api(scripted: OpenAI) -> None:
    answer = scripted.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"50": 10, "51": -100},
        max_completion_tokens=5,
        metadata={"a": "b"},
        n=2,
        parallel_tool_calls=True,
        prompt_cache_key="k",
        response_format={"type": "text"},
        safety_identifier="s",
        seed=-(2**63),
        service_tier="auto",
        stop=None,
        store=False,
        temperature=0.5,
        top_p=0.5,
        user="u",
        verbosity="medium",
    )
    assert len(checked(answer).choices) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.choices[0].finish_reason == "length"


def test_fields_of_other_servers_travel_in_extra_body(scripted: OpenAI) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "truncate_prompt_tokens": 20,
        "allowed_token_ids": [1, 2, 3],
        "bad_words": ["no"],
        "return_token_ids": True,
        "priority": 0,
        "cache_salt": "s",
        "request_id": "mine",
    }
    answer = scripted.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, extra_body=extra)
    checked(answer, TOKEN_FIELDS)
    assert answer.id == "chatcmpl-mine"
    assert len((answer.choices[0].model_extra or {})["token_ids"]) == 4
    assert len((answer.model_extra or {})["prompt_token_ids"]) == 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(scripted: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        scripted.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)
    assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")
    assert param in refused.value.message


def test_raw_and_streaming_responses(scripted: OpenAI) -> None:
    raw = scripted.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=2)
    assert raw.request_id
    assert raw.headers["x-request-id"] == raw.request_id
    assert "server-timing" in raw.headers
    assert checked(raw.parse()).choices[0].finish_reason == "length"
    own = {"x-request-id": "mine-1"}
    with scripted.completions.with_streaming_response.create(
        model=MODEL, prompt="a", max_tokens=2, extra_headers=own
    ) as response:
        assert response.headers["x-request-id"] == "mine-1"
        assert response.parse().usage is not None


# Completions


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("One, two,", 1), (["One,", "Two, three,"], 2), ([1, 2, 3], 1), ([[1, 2], [3], [4, 5, 6]], 3)],
)
def test_completions_of_every_kind_of_prompt(scripted: OpenAI, prompt: Any, num_prompts: int) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "n": 2, "logprobs": 2, "seed": 1, "max_tokens": 6}
    answer = checked(scripted.completions.create(**fields))
    assert answer.id.startswith("cmpl-")
    assert [choice.index for choice in answer.choices] == list(range(num_prompts * 2))
    chunks = [checked(chunk) for chunk in scripted.completions.create(stream=True, **fields)]
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert [part.finish_reason for part in mine if part.finish_reason] == ["length"]
        assert choice.logprobs is not None
        told = [part.logprobs for part in mine if part.logprobs is not None]
        assert list(chain.from_iterable(part.tokens or [] for part in told)) == choice.logprobs.tokens
        assert list(chain.from_iterable(part.text_offset or [] for part in told)) == choice.logprobs.text_offset
        assert list(chain.from_iterable(part.token_logprobs or [] for part in told)) == choice.logprobs.token_logprobs


def test_an_echo_with_logprobs_and_nothing_generated(client: OpenAI) -> None:
    prompt = "The capital of France is Paris"
    for _ in range(2):  # the second time the prefix cache has it
        answer = client.completions.create(model=MODEL, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
        [choice] = checked(answer).choices
        assert choice.text == prompt
        assert choice.finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 0
        assert choice.logprobs is not None
        tokens, logprobs = choice.logprobs.tokens, choice.logprobs.token_logprobs
        assert "".join(tokens or ()) == prompt
        assert logprobs is not None
        assert logprobs[0] is None
        assert all(logprob < 0 for logprob in logprobs[1:])
        assert len(logprobs) == answer.usage.prompt_tokens


def test_best_of_ranks_by_mean_logprob(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "One day", "seed": 3, "temperature": 1.5, "max_tokens": 8}
    best = checked(client.completions.create(best_of=4, n=1, logprobs=0, **fields))
    drawn = client.completions.create(n=4, logprobs=0, **fields)
    means = {}
    for choice in drawn.choices:
        assert choice.logprobs is not None
        logprobs = choice.logprobs.token_logprobs or []
        means[choice.text] = math.fsum(logprobs) / len(logprobs)
    assert best.choices[0].text == max(means, key=lambda text: means[text])


# Embeddings, models, responses


def test_embeddings(client: OpenAI) -> None:
    texts = ["A page of a book.", "A leaf of a tree."]
    answer = checked(client.embeddings.create(model=MODEL, input=texts))
    floats = checked(client.embeddings.create(model=MODEL, input=texts, encoding_format="float"))
    assert [item.index for item in answer.data] == [0, 1]
    for one, other in zip(answer.data, floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.fsum(number**2 for number in one.embedding) == pytest.approx(1, abs=1e-4)
    base = client.embeddings.create(model=MODEL, input=texts[0], encoding_format="base64").data[0].embedding
    decoded = struct.unpack(f"<{len(floats.data[0].embedding)}f", base64.b64decode(str(base)))
    assert decoded == pytest.approx(floats.data[0].embedding, abs=1e-6)
    short = checked(client.embeddings.create(model=MODEL, input=[[1, 2], [3]], dimensions=16))
    assert [len(item.embedding) for item in short.data] == [16, 16]
    assert short.usage.prompt_tokens == 3


def test_models(client: OpenAI) -> None:
    [card] = [checked(model) for model in client.models.list()]
    assert checked(client.models.retrieve(card.id)) == card
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-9")
    assert missing.value.code == "model_not_found"


def test_responses(client: OpenAI) -> None:
    answer = checked(
        client.responses.create(
            model=MODEL,
            instructions="You answer questions.",
            input=[{"role": "user", "content": [{"type": "input_text", "text": "What is the capital of France?"}]}],
            temperature=0,
            max_output_tokens=200,
            metadata={"a": "b"},
        )
    )
    assert "Paris" in answer.output_text
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.metadata == {"a": "b"}
    assert answer.usage is not None
    count = checked(
        client.responses.input_tokens.count(
            model=MODEL, instructions="You answer questions.", input="What is the capital of France?"
        )
    )
    assert count.input_tokens == answer.usage.input_tokens


def test_the_events_of_a_response(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "What is the capital of France?", "temperature": 0}
    whole = client.responses.create(**fields)
    events = [checked(event) for event in client.responses.create(stream=True, **fields)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None


def test_a_response_that_is_cut_off(scripted: OpenAI) -> None:
    with scripted.responses.stream(model=MODEL, input="a", max_output_tokens=5) as stream:
        *_, last = stream
    assert last.type == "response.incomplete"
    final = checked(last.response)
    assert final.status == "incomplete"
    assert final.incomplete_details is not None
    assert final.incomplete_details.reason == "max_output_tokens"
    assert final.usage is not None
    assert final.usage.output_tokens == 5


def test_logprobs_of_a_response(client: OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL,
        input="Say hello.",
        temperature=0,
        max_output_tokens=16,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    [item] = checked(answer).output
    assert item.type == "message"
    [part] = item.content
    assert part.type == "output_text"
    assert part.logprobs
    assert [len(token.top_logprobs) for token in part.logprobs] == [2] * len(part.logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
    ],
)
def test_what_responses_do_not_do_is_refused_by_name(scripted: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        scripted.responses.create(model=MODEL, input="a", **fields)
    assert refused.value.param == param


def test_endpoints_that_are_not_there_are_not_found(scripted: OpenAI) -> None:
    for call in (
        lambda: scripted.responses.retrieve("resp_1"),
        lambda: scripted.moderations.create(input="a"),
        lambda: scripted.files.list(),
        lambda: scripted.images.generate(prompt="a"),
        lambda: scripted.chat.completions.retrieve("chatcmpl-1"),
    ):
        with pytest.raises((openai.NotFoundError, openai.APIStatusError)) as missing:
            call()
        assert missing.value.status_code in (404, 405)
        assert isinstance(missing.value.body, dict)
        assert missing.value.body.keys() == {"message", "type", "param", "code"}


# Errors


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context_length_exceeded", "messages"),
        ({"messages": []}, None, "messages"),
        ({"temperature": 3}, None, "temperature"),
        ({"n": 0}, None, "n"),
        ({"logit_bias": {"99999999": 1}}, None, "logit_bias"),
        ({"top_logprobs": 2}, None, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, None, "stream_options"),
        ({"messages": [{"role": "robot", "content": "a"}]}, None, "messages[0].role"),
    ],
)
def test_bad_requests_name_the_field(scripted: OpenAI, fields: dict[str, Any], code: str | None, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        scripted.chat.completions.create(**({"model": MODEL, "messages": MESSAGES} | fields))
    assert (refused.value.code, refused.value.param) == (code, param)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.request_id


def test_a_useless_retry_is_not_tried(fake_server: LiveServer) -> None:
    requests: list[object] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [requests.append]})
    with (
        OpenAI(base_url=fake_server.base_url, api_key="none", max_retries=3, http_client=http) as client,
        pytest.raises(openai.NotFoundError),
    ):
        client.completions.create(model="gpt-9", prompt="a")
    assert len(requests) == 1


def test_a_request_that_times_out_is_told_in_time(scripted: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as late:
        scripted.completions.create(
            model=MODEL, prompt="a", max_tokens=8000, extra_body={"ignore_eos": True, "timeout": 0.05}
        )
    assert late.value.status_code == 504
    assert late.value.code == "deadline_exceeded"


# The asynchronous client


async def test_the_asynchronous_client(live_server: LiveServer) -> None:
    async with AsyncOpenAI(base_url=live_server.base_url, api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, **GREEDY}
        chat = checked(await client.chat.completions.create(**fields))
        chunks = [checked(chunk) async for chunk in await client.chat.completions.create(stream=True, **fields)]
        assert _text(chunks) == chat.choices[0].message.content
        async with client.chat.completions.stream(**fields) as helper:
            final = checked(await helper.get_final_completion())
        assert final.choices[0].message.content == chat.choices[0].message.content
        fields = {"model": MODEL, "prompt": "One, two,", "max_tokens": 8, "temperature": 0}
        whole = checked(await client.completions.create(**fields))
        parts = [checked(part) async for part in await client.completions.create(stream=True, **fields)]
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


async def test_the_other_endpoints_asynchronously(fake_server: LiveServer) -> None:
    async with AsyncOpenAI(base_url=fake_server.base_url, api_key="none", max_retries=0) as client:
        assert len(checked(await client.embeddings.create(model=MODEL, input="a")).data) == 1
        assert [checked(model).id async for model in client.models.list()] == [MODEL]
        assert (
            checked(await client.responses.create(model=MODEL, input="a", max_output_tokens=2)).status == "incomplete"
        )
        async with client.responses.stream(model=MODEL, input="a", max_output_tokens=5) as events:
            numbers = [event.sequence_number async for event in events]
        assert numbers == list(range(len(numbers)))
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=MODEL, prompt="a", temperature=-1)


async def test_a_stream_that_is_left_early_can_be_closed(fake_server: LiveServer) -> None:
    async with AsyncOpenAI(base_url=fake_server.base_url, api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model=MODEL, prompt="a", max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            await stream.close()
            break
        assert checked(await client.completions.create(model=MODEL, prompt="a", max_tokens=1)).choices
