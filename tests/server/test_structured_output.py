"""Answers in a form, over HTTP: grammars that reach the engine, refusals, limits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.structured.matching import accepts, begins, tokenizer
from tests.server.toy import TEMPLATE, ToyEngine, saying, toy_server

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


def named(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "point", "schema": schema} | fields}


async def grammar_of(template: str = TEMPLATE, **fields: Any) -> str:
    """What the engine is told of a chat answer's form."""
    async with toy_server(tokenizer=tokenizer(), template=template) as toy:
        response = await toy.post(CHAT, {"messages": HI} | fields)
    assert response.status_code == 200, response.text
    grammar = toy.engine.requests[0].constraint
    assert grammar is not None
    return grammar


async def refusal_of(**fields: Any) -> tuple[str, str]:
    """(param, message)."""
    async with toy_server() as toy:
        response = await toy.post(CHAT, {"messages": HI} | fields)
    assert response.status_code == 400, response.text
    assert toy.engine.requests == []
    error = response.json()["error"]
    return error["param"], error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": named(POINT)},
        {"response_format": named(POINT, strict=True)},
        {"response_format": named(POINT, strict=False)},
        {"response_format": {"type": "json_object", "schema": POINT}},
        {"structured_outputs": {"json": POINT}},
        {"structured_outputs": {"json": json.dumps(POINT)}},
        {"guided_json": POINT},
        {"guided_json": json.dumps(POINT)},
        {"json_schema": POINT},
    ],
)
async def test_a_schema_is_enforced_by_whatever_name_it_comes(fields: dict[str, Any]) -> None:
    grammar = await grammar_of(**fields)
    assert accepts(grammar, '{"x": 12}')
    assert not begins(grammar, '{"x": "')
    assert not begins(grammar, '{"y"')
    assert not begins(grammar, "Sure")


async def test_json_object_is_any_object() -> None:
    grammar = await grammar_of(response_format={"type": "json_object"})
    assert accepts(grammar, '{"a": [1, {"b": null}]}')
    assert not begins(grammar, "[")


@pytest.mark.parametrize(
    "fields", [{"guided_regex": r"\d{2}/a+"}, {"structured_outputs": {"regex": r"\d{2}/a+"}}, {"regex": r"\d{2}/a+"}]
)
async def test_a_regular_expression_is_of_the_whole_answer(fields: dict[str, Any]) -> None:
    grammar = await grammar_of(**fields)
    assert accepts(grammar, "12/aaa")
    assert not accepts(grammar, "12/")
    assert not begins(grammar, "x")


@pytest.mark.parametrize(
    "fields", [{"guided_choice": ["yes", "no\n\"'"]}, {"structured_outputs": {"choice": ["yes", "no\n\"'"]}}]
)
async def test_a_choice_is_one_of_its_texts(fields: dict[str, Any]) -> None:
    grammar = await grammar_of(**fields)
    assert accepts(grammar, "yes")
    assert accepts(grammar, "no\n\"'")
    assert not accepts(grammar, "no")
    assert not begins(grammar, "maybe")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_grammar": 'start: "a" | "b" start'},
        {"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}},
        {"ebnf": 'root ::= "a" | "b" root'},
        {"grammar": 'root ::= "a" | "b" root'},
    ],
)
async def test_a_grammar_may_be_lark_or_gbnf(fields: dict[str, Any]) -> None:
    grammar = await grammar_of(**fields)
    assert accepts(grammar, "bba")
    assert not accepts(grammar, "bb")


async def test_blanks_may_be_ruled_out() -> None:
    grammar = await grammar_of(structured_outputs={"json": POINT, "disable_any_whitespace": True})
    assert accepts(grammar, '{"x":1}')
    assert not begins(grammar, '{"x": ')
    grammar = await grammar_of(structured_outputs={"json": POINT, "whitespace_pattern": "\t"})
    assert accepts(grammar, '{\t"x":1}')


async def test_reasoning_comes_before_the_form() -> None:
    grammar = await grammar_of(TEMPLATE + "{# </think> #}", response_format=named(POINT))
    assert accepts(grammar, '<think>Well, "x"?</think>\n{"x": 1}')
    assert accepts(grammar, '{"x": 1}')
    assert not begins(grammar, "<think>Well</think> x")


async def test_completions_know_the_same_forms() -> None:
    async with toy_server() as toy:
        await toy.post("/v1/completions", prompt=["a", "b"], guided_choice=["yes", "no"])
        await toy.post("/v1/completions", prompt="a")
    first, second, free = toy.engine.requests
    assert first.constraint == second.constraint
    assert first.constraint is not None
    assert accepts(first.constraint, "yes")
    assert free.constraint is None


async def test_free_text_has_no_grammar() -> None:
    async with toy_server() as toy:
        await toy.post(CHAT, messages=HI, response_format={"type": "text"})
    assert toy.engine.requests[0].constraint is None


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": named({"type": "array", "uniqueItems": True})}, "response_format", "'uniqueItems'"),
        ({"response_format": named({"type": "string", "format": "idn-email"})}, "response_format", "'idn-email'"),
        ({"response_format": named({"type": "nonsense"})}, "response_format", "nonsense"),
        ({"response_format": named({"type": "string", "pattern": "(a"})}, "response_format", "unclosed"),
        ({"response_format": named({"type": "string", "pattern": "(?=a)"})}, "response_format", "look-around"),
        ({"response_format": named({"$ref": "#"})}, "response_format", "without end"),
        ({"response_format": named({"$ref": "#/$defs/none"})}, "response_format", "/$defs/none"),
        (
            {"response_format": named({"oneOf": [{"type": "string"}, {"minLength": 2, "type": "string"}]})},
            "response_format",
            "oneOf",
        ),
        ({"response_format": named({"enum": []})}, "response_format", "nsatisfiable"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format",
            "name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True}}},
            "response_format",
            "schema",
        ),
        ({"response_format": named(POINT, strict="yes")}, "response_format", "strict"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
        ({"guided_choice": []}, "guided_choice", "list"),
        ({"guided_choice": ["a"] * 10_001}, "guided_choice", "10001"),
        ({"guided_grammar": "start: unknown_rule"}, "guided_grammar", "unknown_rule"),
        ({"guided_grammar": "what is this"}, "guided_grammar", "GBNF"),
        ({"guided_grammar": "root ::= " + "(" * 5000}, "guided_grammar", "GBNF"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "exclude"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"guided_regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids", "guided_regex"),
        (
            {
                "guided_regex": "a",
                "continue_final_message": True,
                "messages": [*HI, {"role": "assistant", "content": "x"}],
            },
            "guided_regex",
            "continue_final_message",
        ),
    ],
)
async def test_what_cannot_be_enforced_is_refused_by_its_name(fields: dict[str, Any], param: str, word: str) -> None:
    found, message = await refusal_of(**fields)
    assert found == param
    assert word in message


async def test_large_schemas_are_refused_before_anything_is_made_of_them() -> None:
    large = {"enum": ["x" * 1000 + str(i) for i in range(5000)]}
    param, message = await refusal_of(response_format=named(large))
    assert param == "response_format"
    assert "at most 524288 are allowed" in message


async def test_an_enum_of_ten_thousand_is_served() -> None:
    grammar = await grammar_of(response_format=named({"enum": [f"value {i}" for i in range(10_000)]}))
    assert accepts(grammar, '"value 9999"')
    assert not accepts(grammar, '"value 10000"')


async def test_a_schema_nested_without_measure_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(120):
        schema = {"type": "array", "items": schema}
    param, message = await refusal_of(response_format=named(schema))
    assert param == "response_format"
    assert "levels deep" in message


async def test_the_time_of_compiling_is_bounded() -> None:
    async with toy_server(grammar_timeout_seconds=1e-6) as toy:
        response = await toy.post(CHAT, messages=HI, guided_regex="a")
        assert response.status_code == 400
        assert "not compiled within" in response.json()["error"]["message"]


async def test_bad_grammars_at_once_leave_a_bystander_alone() -> None:
    """Reports: a bad regex or schema killed the server."""
    bad: list[dict[str, Any]] = [
        {"guided_regex": "(a"},
        {"response_format": named({"$ref": "#"})},
        {"response_format": named({"type": "nonsense"})},
        {"guided_grammar": "start: nothing"},
        {"response_format": named({"enum": ["x" * 1000 + str(i) for i in range(1000)]})},
    ]
    async with toy_server(ToyEngine(saying("Hello" * 20))) as toy:
        bystander = asyncio.create_task(toy.events(CHAT, messages=HI))
        answers = await asyncio.gather(*(toy.post(CHAT, {"messages": HI} | bad[i % 5]) for i in range(50)))
        chunks = await bystander
    assert {answer.status_code for answer in answers} == {400}
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "Hello" * 20
