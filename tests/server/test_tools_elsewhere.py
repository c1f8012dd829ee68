"""Tools, forms and reasoning through /v1/messages and /v1/responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from server.protocol.anthropic import Message
from server.protocol.responses import ResponseObject
from server.structured.call_formats import HERMES
from tests.server.structured.matching import accepts, begins
from tests.server.toy import TEMPLATE, ToyEngine, saying, toy_server

KNOWS_TOOLS = TEMPLATE + "{# tools: <tool_call> </think> #}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Bonn"}), ("now", {})]
SAID = "<think>Hm.</think>\n\nI look. " + HERMES.write(CALLS)
ANTHROPIC_TOOLS = [{"name": "get_weather", "description": "d", "input_schema": SCHEMA}, {"name": "now"}]
RESPONSES_TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": SCHEMA},
    {"type": "function", "name": "now"},
]


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of named events; the names are the types."""
    found = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def asked(path: str, said: str = SAID, **fields: Any) -> tuple[Any, str | None]:
    """(the answer: events if streamed, else the body; the grammar that the engine was given)."""
    async with toy_server(ToyEngine(saying(said)), template=KNOWS_TOOLS) as toy:
        response = await toy.post(path, fields)
    assert response.status_code == 200, response.text
    answer = events_of(response.text) if fields.get("stream") else response.json()
    return answer, toy.engine.requests[0].constraint


# Anthropic


async def messages(**fields: Any) -> tuple[Any, str | None]:
    base: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 200,
        "tools": ANTHROPIC_TOOLS,
    }
    return await asked("/v1/messages", **base | fields)


async def test_a_message_holds_thinking_text_and_uses_of_tools() -> None:
    body, _ = await messages()
    Message.model_validate(body)
    assert body["stop_reason"] == "tool_use"
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert body["content"][0]["thinking"] == "Hm."
    assert body["content"][1]["text"] == "I look. "
    assert [(block["name"], block["input"]) for block in body["content"][2:]] == CALLS
    assert body["content"][2]["id"].startswith("toolu_")


async def test_a_streamed_message_has_a_block_for_each_part() -> None:
    events, _ = await messages(stream=True)
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2, 3]
    texts = [""] * 4
    for event in events:
        if event["type"] == "content_block_delta":
            texts[event["index"]] += next(
                event["delta"][key] for key in ("text", "thinking", "partial_json") if key in event["delta"]
            )
    assert texts[:2] == ["Hm.", "I look. "]
    assert [json.loads(text) for text in texts[2:]] == [{"city": "Bonn"}, {}]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("choice", "free", "twice"),
    [
        ({"type": "auto"}, True, True),
        ({"type": "any"}, False, True),
        ({"type": "any", "disable_parallel_tool_use": True}, False, False),
        ({"type": "tool", "name": "now"}, False, True),
    ],
)
async def test_a_choice_of_tools_is_a_grammar(choice: dict[str, Any], free: bool, twice: bool) -> None:
    _, grammar = await messages(tool_choice=choice)
    assert grammar is not None
    assert begins(grammar, "Hello") is free
    assert begins(grammar, HERMES.write([CALLS[1]] * 2)) is twice


async def test_uses_and_results_of_tools_are_told_again() -> None:
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "now", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "noon"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    async with toy_server() as toy:
        await toy.post("/v1/messages", messages=conversation, max_tokens=5)
    prompt = bytes(token for token in toy.engine.requests[0].prompt_token_ids if token < 256).decode()
    assert (
        f"assistant\n{HERMES.write(CALLS[1:])}\nuser\n<tool_response>\nnoon\n</tool_response>\nuser\nand?\n" in prompt
    )


async def test_a_schema_that_cannot_be_enforced_is_named_as_the_api_names_it() -> None:
    tools = [{"name": "f", "input_schema": {"not": {}}}]
    async with toy_server() as toy:
        response = await toy.post(
            "/v1/messages", messages=[{"role": "user", "content": "hi"}], max_tokens=5, tools=tools
        )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[0].input_schema"


# Responses


async def responses(**fields: Any) -> tuple[Any, str | None]:
    return await asked("/v1/responses", **{"input": "hi", "tools": RESPONSES_TOOLS} | fields)


async def test_a_response_holds_reasoning_a_message_and_calls() -> None:
    body, _ = await responses()
    OpenAIResponse.model_validate(body)
    ResponseObject.model_validate(body)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert body["output"][1]["content"][0]["text"] == "I look. "
    assert [(item["name"], json.loads(item["arguments"])) for item in body["output"][2:]] == CALLS
    assert body["status"] == "completed"


async def test_a_streamed_response_has_its_items_one_after_the_other() -> None:
    events, _ = await responses(stream=True)
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call", "function_call"]
    done = [event["arguments"] for event in events if event["type"] == "response.function_call_arguments.done"]
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == "".join(done)
    assert [json.loads(text) for text in done] == [{"city": "Bonn"}, {}]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == events[-1][
        "response"
    ]["output"]


async def test_a_response_in_a_form() -> None:
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    body, grammar = await responses(said='{"city": "Bonn"}', tools=[], text={"format": form})
    OpenAIResponse.model_validate(body)
    assert grammar is not None
    assert accepts(grammar, '{"city": "Bonn"}')
    assert not begins(grammar, "Hello")
    assert body["text"]["format"] == form


async def test_a_choice_of_functions_is_a_grammar() -> None:
    _, grammar = await responses(tool_choice={"type": "function", "name": "now"}, parallel_tool_calls=False)
    assert grammar is not None
    assert accepts(grammar, HERMES.write(CALLS[1:]))
    assert not begins(grammar, HERMES.write(CALLS[:1]))


async def test_calls_and_their_results_are_told_again() -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    async with toy_server() as toy:
        response = await toy.post("/v1/responses", input=items, max_output_tokens=1)
    assert response.status_code == 200, response.text
    prompt = bytes(token for token in toy.engine.requests[0].prompt_token_ids if token < 256).decode()
    assert f"assistant\n{HERMES.write(CALLS)}\nuser\n<tool_response>\nrain\n" in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "name": "f", "parameters": {"not": {}}}]}, "tools[0].parameters"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
    ],
)
async def test_what_does_not_fit_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    async with toy_server() as toy:
        response = await toy.post("/v1/responses", {"input": "hi"} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
