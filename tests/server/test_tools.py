"""Tools over HTTP: prompts, grammars that reach the engine, messages and deltas, refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.protocol.chat import ChatChunk, ChatResponse
from server.structured.call_formats import BARE_JSON, HERMES
from tests.server.structured.matching import accepts, begins
from tests.server.toy import TEMPLATE, ToyEngine, saying, toy_server

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
KNOWS_TOOLS = TEMPLATE + "{# tools: <tool_call> #}"
THINKS = KNOWS_TOOLS + "{# </think> #}"
WEATHER = {
    "name": "get_weather",
    "description": "The weather somewhere",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
NOW = {"name": "now"}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Köln"}), ("now", {})]


async def chunks_of(text: str, template: str = KNOWS_TOOLS, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of an engine that says this, checked against the client's types and ours."""
    async with toy_server(ToyEngine(saying(text)), template=template) as toy:
        chunks = await toy.events(PATH, **{"messages": HI, "tools": TOOLS} | fields)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        ChatChunk.model_validate(chunk)
    return chunks


async def answer_of(text: str, template: str = KNOWS_TOOLS, **fields: Any) -> dict[str, Any]:
    """The first choice of an engine that says this, checked against the client's types and ours."""
    async with toy_server(ToyEngine(saying(text)), template=template) as toy:
        response = await toy.post(PATH, {"messages": HI, "tools": TOOLS} | fields)
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json(), strict=True)
    ChatResponse.model_validate(response.json())
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def grammar_of(template: str = KNOWS_TOOLS, **fields: Any) -> str | None:
    """What the engine is told of the answer's form."""
    async with toy_server(template=template) as toy:
        response = await toy.post(PATH, {"messages": HI, "tools": TOOLS} | fields)
    assert response.status_code == 200, response.text
    return toy.engine.requests[0].constraint


async def prompt_of(template: str = TEMPLATE, **fields: Any) -> str:
    async with toy_server(template=template) as toy:
        response = await toy.post(f"{PATH}/render", {"messages": HI} | fields)
    assert response.status_code == 200, response.text
    text: str = response.json()["prompt"]
    return text


def deltas(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


# Answers


async def test_calls_come_in_the_message() -> None:
    choice = await answer_of("Let me see.\n" + HERMES.write(CALLS))
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see.\n"
    assert [call["type"] for call in message["tool_calls"]] == ["function", "function"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "now"]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"city": "Köln"}, {}]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(one.startswith("call_") for one in ids)


async def test_an_answer_of_calls_alone_has_no_content() -> None:
    assert (await answer_of(HERMES.write(CALLS)))["message"]["content"] is None


async def test_an_answer_without_calls_has_none() -> None:
    choice = await answer_of("Hello <tool")
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "Hello <tool", "refusal": None}


async def test_the_first_delta_of_a_call_has_its_id_and_name_and_the_others_pieces_of_arguments() -> None:
    chunks = await chunks_of("Well. " + HERMES.write(CALLS))
    told = deltas(chunks)
    assert told[0] == {"role": "assistant", "content": None, "refusal": None}
    assert "".join(delta.get("content") or "" for delta in told) == "Well. "
    calls = [call for delta in told for call in delta.get("tool_calls", ())]
    for index, (name, arguments) in enumerate(CALLS):
        first, *others = [call for call in calls if call["index"] == index]
        assert first == {
            "index": index,
            "id": first["id"],
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in others)
        assert json.loads("".join(call["function"]["arguments"] for call in others)) == arguments
    assert len(calls) == 20  # piece by piece, as it is drawn
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"


async def test_the_clients_own_sum_of_a_stream_is_the_answer() -> None:
    state = ChatCompletionStreamState()
    for chunk in await chunks_of("Well. " + HERMES.write(CALLS), n=2):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    for choice in state.get_final_completion().choices:
        assert choice.message.content == "Well. "
        calls = choice.message.tool_calls or []
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == CALLS
        assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("max_tokens", range(1, 70))
async def test_a_stream_may_be_cut_anywhere(max_tokens: int) -> None:
    text = HERMES.write(CALLS[:1])
    chunks = await chunks_of(text, max_tokens=max_tokens, tool_choice="required")
    calls = [call for delta in deltas(chunks) for call in delta.get("tool_calls", ())]
    written = "".join(call["function"]["arguments"] for call in calls)
    assert json.dumps({"city": "Köln"}, ensure_ascii=False).startswith(written.rstrip("\ufffd"))
    finish = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    cut = max_tokens <= len(text.encode())
    assert finish == [None] * (len(chunks) - 1) + ["length" if cut else "tool_calls"]


async def test_a_stop_string_within_a_call_ends_the_answer_with_stop() -> None:
    choice = await answer_of(HERMES.write(CALLS), stop="Kö")
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


async def test_reasoning_has_a_field_of_its_own() -> None:
    text = "<think>\nA call, then.\n</think>\n\n" + HERMES.write(CALLS[1:])
    choice = await answer_of(text, THINKS)
    assert choice["message"]["reasoning_content"] == "A call, then.\n"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"
    told = deltas(await chunks_of(text, THINKS))
    assert "".join(delta.get("reasoning_content", "") for delta in told) == "A call, then.\n"
    assert "".join(delta.get("content") or "" for delta in told) == ""


async def test_tokens_of_reasoning_are_counted() -> None:
    text = "<think>12345</think>\n\nYes."
    async with toy_server(ToyEngine(saying(text)), template=THINKS) as toy:
        whole = (await toy.post(PATH, messages=HI)).json()
        chunks = await toy.events(PATH, messages=HI, stream_options={"include_usage": True})
    counted = [body["usage"]["completion_tokens_details"]["reasoning_tokens"] for body in (whole, chunks[-1])]
    assert counted == [len(">12345</think")] * 2


async def test_reasoning_is_told_apart_without_tools() -> None:
    choice = await answer_of("<think>Hm.</think>\n\nYes.", THINKS, tools=None)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", "Yes.")
    assert await grammar_of(THINKS, tools=None) is None


async def test_logprobs_and_token_ids_of_a_call_add_up() -> None:
    text = HERMES.write(CALLS)
    chunks = await chunks_of(text, logprobs=True, return_token_ids=True)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    assert ids == [*text.encode(), 258]
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == len(ids)
    whole = await answer_of(text, logprobs=True)
    assert len(whole["logprobs"]["content"]) == len(ids)


async def test_functions_of_the_older_form_are_answered_in_it() -> None:
    fields: dict[str, Any] = {"tools": None, "functions": [WEATHER, NOW], "function_call": {"name": "get_weather"}}
    choice = await answer_of(HERMES.write(CALLS[:1]), **fields)
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    told = [
        delta["function_call"]
        for delta in deltas(await chunks_of(HERMES.write(CALLS[:1]), **fields))
        if "function_call" in delta
    ]
    assert told[0] == {"name": "get_weather", "arguments": ""}
    assert "".join(piece["arguments"] for piece in told) == '{"city": "Köln"}'
    assert all("name" not in piece for piece in told[1:])


# Grammars


async def test_without_a_choice_the_model_may_call() -> None:
    grammar = await grammar_of()
    assert grammar is not None
    assert accepts(grammar, "Hello")
    assert accepts(grammar, HERMES.write(CALLS))
    assert not begins(grammar, HERMES.write([("get_weather", {"city": 5})]))


async def test_required_and_named_leave_no_way_round() -> None:
    required = await grammar_of(tool_choice="required")
    named = await grammar_of(tool_choice={"type": "function", "function": {"name": "now"}}, parallel_tool_calls=False)
    assert required is not None
    assert named is not None
    assert not begins(required, "Hello")
    assert accepts(required, HERMES.write(CALLS))
    assert not begins(named, HERMES.write(CALLS[:1]))
    assert accepts(named, HERMES.write(CALLS[1:]))
    assert not begins(named, HERMES.write([CALLS[1], CALLS[1]]))


async def test_allowed_tools_are_a_part_of_those_that_are_told() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    grammar = await grammar_of(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert grammar is not None
    assert not begins(grammar, HERMES.write(CALLS[:1]))
    assert not begins(grammar, "Hello")


async def test_with_none_there_are_no_tools() -> None:
    assert await grammar_of(tool_choice="none") is None
    assert await prompt_of(tools=TOOLS, tool_choice="none") == await prompt_of()


async def test_an_answer_in_a_form_may_be_a_call_instead() -> None:
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "a",
            "schema": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    grammar = await grammar_of(response_format=form)
    assert grammar is not None
    assert accepts(grammar, '{"a": 1}')
    assert accepts(grammar, HERMES.write(CALLS))
    assert not begins(grammar, "Hello")


async def test_a_function_without_parameters_takes_none() -> None:
    grammar = await grammar_of(tool_choice="required")
    assert grammar is not None
    assert not begins(grammar, HERMES.write([("now", {"zone": "UTC"})]))


# Prompts


async def test_a_template_that_knows_tools_is_given_them() -> None:
    template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call>{{ messages[0].content }}"
    assert await prompt_of(template, tools=TOOLS) == "get_weather now <tool_call>hi"


async def test_other_templates_get_a_system_message() -> None:
    prompt = await prompt_of(tools=TOOLS)
    assert prompt.startswith("<|im_start|>system\nYou can call functions.")
    assert json.dumps(WEATHER) in prompt
    joined = await prompt_of(tools=TOOLS, messages=[{"role": "system", "content": "Be brief."}, *HI])
    assert joined.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")


async def test_a_conversation_with_calls_and_results_is_told_again() -> None:
    called = [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}},
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
    ]
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": called},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    ]
    prompt = await prompt_of(messages=messages)
    assert f"<|im_start|>assistant\n{HERMES.write(CALLS)}<|im_end|>" in prompt
    assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>" in prompt
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments.city }}) "
        "{% endfor %}{{ m.role }}:{{ m.content }} {% endfor %}{# tools <tool_call> #}"
    )
    assert await prompt_of(template, messages=messages) == (
        "user:hi get_weather(Köln) now() assistant: tool:rain tool:noon "
    )


async def test_ids_of_calls_are_what_a_mistral_template_insists_on() -> None:
    template = (
        "{# tools [TOOL_CALLS][ #}{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }} {% endfor %}"
        "{{ m.tool_call_id }} {% endfor %}"
    )
    call = {"id": "call_of_another_server", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "x"},
    ]
    first, second = (await prompt_of(template, messages=messages)).split()
    assert first == second
    assert len(first) == 9


async def test_a_result_has_the_name_of_its_function_where_the_client_leaves_it_out() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.name }} {% endfor %}{# tools <tool_call> #}"
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "x"}]
    assert await prompt_of(template, messages=messages) == "assistant: tool:now "


async def test_a_template_that_takes_one_call_gets_one() -> None:
    grammar = await grammar_of(TEMPLATE + "{# tools <|start_header_id|> '\"parameters\": ' #}")
    assert grammar is not None
    assert accepts(grammar, BARE_JSON.write(CALLS[:1]))
    assert not begins(grammar, BARE_JSON.write(CALLS))


# Refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [*TOOLS, TOOLS[1]]}, "tools[2].function.name"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/no"}}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "now"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"functions": [WEATHER]}, "functions"),
        ({"function_call": {"name": "now"}}, "function_call"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0]",
        ),
    ],
)
async def test_what_does_not_fit_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    async with toy_server(template=KNOWS_TOOLS) as toy:
        response = await toy.post(PATH, {"messages": HI, "tools": TOOLS} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert toy.engine.requests == []


async def test_of_tools_and_a_form_the_one_at_fault_is_named() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/no"}}}
    async with toy_server(template=KNOWS_TOOLS) as toy:
        response = await toy.post(PATH, messages=HI, tools=TOOLS, response_format=form)
    assert response.json()["error"]["param"] == "response_format"


async def test_an_answer_in_a_form_beside_calls_needs_a_format_that_tells_them_apart() -> None:
    llama = TEMPLATE + "{# tools <|start_header_id|> '\"parameters\": ' #}"
    async with toy_server(template=llama) as toy:
        response = await toy.post(PATH, messages=HI, tools=TOOLS, response_format={"type": "json_object"})
    assert response.json()["error"]["param"] == "response_format"
