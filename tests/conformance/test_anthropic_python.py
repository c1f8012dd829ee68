"""The anthropic package for Python: messages, their stream, token counts, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.conftest import MODEL
from tests.conformance.strict import checked
from tests.e2e.live import LiveServer

anthropic = pytest.importorskip("anthropic", reason="needs the extra: pip install 'octavo[conformance]'")

ASKED: dict[str, Any] = {
    "model": MODEL,
    "system": "You answer questions.",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}],
    "max_tokens": 24,
    "extra_body": {"temperature": 0},  # this package no longer has it as an argument
}


@pytest.fixture
def client(live_server: LiveServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=live_server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message(client: Any) -> None:
    message = checked(client.messages.create(**ASKED))
    [block] = message.content
    assert "Paris" in block.text
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert message.id.startswith("msg_")
    count = checked(client.messages.count_tokens(**{key: ASKED[key] for key in ("model", "system", "messages")}))
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens


def test_the_events_of_a_stream(client: Any) -> None:
    whole = client.messages.create(**ASKED)
    events = [checked(event) for event in client.messages.create(stream=True, **ASKED)]
    kinds = [event.type for event in events]
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * kinds.count("content_block_delta"),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == whole.content[0].text
    delta = events[-2]
    assert delta.delta.stop_reason == "end_turn"
    assert delta.usage.output_tokens == whole.usage.output_tokens


def test_the_stream_helper(client: Any) -> None:
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = checked(stream.get_final_message())
    assert final.content[0].text == text
    assert "Paris" in text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0


def test_how_a_message_ends(client: Any) -> None:
    text = client.messages.create(**ASKED).content[0].text
    stop = text[10:13]
    stopped = checked(client.messages.create(**ASKED, stop_sequences=["@@", stop]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == text[: text.index(stop)]
    cut = checked(client.messages.create(**(ASKED | {"max_tokens": 2})))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


def test_a_last_message_of_the_assistant_is_continued(client: Any) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": "The capital of"}]
    assert "Paris" in checked(client.messages.create(**(ASKED | {"messages": messages}))).content[0].text


async def test_the_asynchronous_client(live_server: LiveServer) -> None:
    async with anthropic.AsyncAnthropic(base_url=live_server.url, api_key="none", max_retries=0) as client:
        message = checked(await client.messages.create(**ASKED))
        async with client.messages.stream(**ASKED) as stream:
            text = "".join([part async for part in stream.text_stream])
    assert text == message.content[0].text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as refused:
        client.messages.create(**(ASKED | fields))
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"


def test_an_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**(ASKED | {"model": "claude-9"}))
    assert missing.value.body["error"]["type"] == "not_found_error"


def test_a_tool_is_used_and_its_result_goes_back(client: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "London"]}}, "required": ["city"]}
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    asked = ASKED | {
        "max_tokens": 100,
        "tools": [{"name": "get_weather", "input_schema": schema}],
        "tool_choice": choice,
    }
    message = checked(client.messages.create(**asked))
    assert message.stop_reason == "tool_use"
    [block] = message.content
    assert block.input["city"] in ("Paris", "London")
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert [part.input for part in streamed.content] == [block.input]
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "Rain"}
    turns = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = checked(client.messages.create(**(ASKED | {"messages": [*ASKED["messages"], *turns]})))
    assert answer.content[0].type == "text"
