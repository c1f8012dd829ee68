"""Structured output and tools as people use them: openai's own helpers, instructor, LangChain, a loop of an agent.

What the default model, a small one, says is of no account here; that it always has the form that was asked for is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel, Field

from tests.conformance.conftest import MODEL
from tests.e2e.live import LiveServer

SEEDS = (1, 2)
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Ada Lovelace, 36, lives in London."}]


class Level(StrEnum):
    LOW = "low"
    HIGH = "high"


class Address(BaseModel):
    street: str = Field(max_length=20)
    city: Literal["London", "Paris"]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    level: Level
    address: Address
    tags: list[Literal["a", "b"]] = Field(max_length=2)
    note: str | None = Field(None, max_length=10)


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=7)


def tool(name: str, model: type[BaseModel]) -> ChatCompletionToolParam:
    return {"type": "function", "function": {"name": name, "parameters": model.model_json_schema()}}


@pytest.fixture
def client(live_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=live_server.base_url, api_key="none", max_retries=0) as client:
        yield client


# openai


@pytest.mark.parametrize("seed", SEEDS)
def test_openai_parses_an_answer(client: OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Person, seed=seed, max_tokens=400
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("seed", SEEDS)
def test_openai_parses_a_call(client: OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=seed,
        max_tokens=200,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_openai_streams_an_answer_and_parses_it(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Person, seed=3, max_tokens=400
    ) as stream:
        kinds = {event.type for event in stream}
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Person)
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_openai_streams_calls_and_parses_them(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=3,
        max_tokens=200,
    ) as stream:
        events = list(stream)
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [json.loads(call.function.arguments)]


def test_openai_parses_a_response(client: OpenAI) -> None:
    answer = client.responses.parse(model=MODEL, input="Ada Lovelace", text_format=Person, max_output_tokens=400)
    assert isinstance(answer.output_parsed, Person)


@pytest.mark.parametrize("max_tokens", range(1, 41))
def test_a_required_call_may_be_cut_anywhere(client: OpenAI, max_tokens: int) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=QUESTION,
        tools=[tool("get_weather", GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=7,
        max_tokens=max_tokens,
    ) as stream:
        list(stream)
        [choice] = stream.current_completion_snapshot.choices
    for call in choice.message.tool_calls or []:
        assert call.function.name == "get_weather"
        if choice.finish_reason == "tool_calls":
            GetWeather.model_validate_json(call.function.arguments)
    assert choice.finish_reason in ("length", "tool_calls")
    if max_tokens < 12:
        assert choice.finish_reason == "length"


# instructor


@pytest.fixture
def instructed(client: OpenAI) -> Any:
    instructor = pytest.importorskip("instructor", reason="pip install --no-deps instructor")
    return lambda mode: instructor.from_openai(client, mode=instructor.Mode[mode])


class Anything(BaseModel, extra="allow"):
    """Whatever a model puts into a JSON object."""


class Now(BaseModel):
    """The time."""


def test_instructor_takes_an_object_without_a_schema(instructed: Any) -> None:
    """In this mode the schema is in the prompt alone."""
    answer = instructed("JSON").chat.completions.create(
        model=MODEL, messages=QUESTION, response_model=Anything, max_tokens=400, seed=1, max_retries=0
    )
    assert isinstance(answer, Anything)


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_instructor(instructed: Any, mode: str) -> None:
    person = instructed(mode).chat.completions.create(
        model=MODEL, messages=QUESTION, response_model=Person, max_tokens=400, seed=1, max_retries=0
    )
    assert isinstance(person, Person)


# LangChain


@pytest.fixture
def chat(live_server: LiveServer) -> Any:
    langchain_openai = pytest.importorskip(
        "langchain_openai", reason="needs the extra: pip install 'octavo[conformance]'"
    )
    return langchain_openai.ChatOpenAI(
        base_url=live_server.base_url, api_key="none", model=MODEL, max_tokens=400, max_retries=0, seed=1
    )


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_with_structured_output(chat: Any, method: str) -> None:
    assert isinstance(chat.with_structured_output(Person, method=method).invoke("Ada Lovelace"), Person)


def test_langchain_json_mode(chat: Any) -> None:
    bound = chat.with_structured_output(None, method="json_mode", include_raw=True)
    raw = bound.invoke("Answer with a JSON object that has one key.", max_tokens=150)["raw"]
    assert raw.content.startswith("{")


def test_langchain_bind_tools(chat: Any) -> None:
    bound = chat.bind_tools([GetWeather, Person], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke("What is the weather in London?")
    [call] = answer.tool_calls
    assert call["name"] in ("GetWeather", "Person")
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    chunks = list(bound.stream("What is the weather in London?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [(call["name"], call["args"])]


# An agent


def test_an_agent_takes_three_steps_with_two_tools(client: OpenAI) -> None:
    """Weather, then time, then an answer: calls and results go back into the conversation."""
    tools = [tool("get_weather", GetWeather), tool("now", Now)]
    results = {"get_weather": "Rain, 12 degrees", "now": "Noon"}
    messages: list[Any] = [{"role": "system", "content": "Use the tools."}, *QUESTION]
    for name in ("get_weather", "now"):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=tools,
            tool_choice={"type": "function", "function": {"name": name}},
            parallel_tool_calls=False,
            seed=1,
            max_tokens=150,
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        [call] = message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == name
        messages.append(message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": results[name]})
    last = client.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, tool_choice="none", temperature=0, max_tokens=60
    )
    assert last.choices[0].message.content
    assert not last.choices[0].message.tool_calls
    assert last.usage is not None
    assert last.usage.prompt_tokens > 100
