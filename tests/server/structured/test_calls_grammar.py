"""Tools as grammars: what an answer may be, by format and choice."""

from __future__ import annotations

from typing import Any

import pytest

from server.structured.call_formats import (
    BARE_JSON,
    BRACKETED,
    BRACKETED_ARGS,
    BRACKETED_SPACED,
    GENERIC,
    HERMES,
    PYTHONIC,
    CallFormat,
    format_of_template,
    instructions,
)
from server.structured.calls_grammar import MAX_CALLS, CallRules, Function, calls_rule
from server.structured.parser import ReasoningMarks
from server.structured.reasoning import after_reasoning, reasoning_of
from server.structured.schema import prepare
from tests.server.structured.matching import accepts, begins, builder

FORMATS = (GENERIC, HERMES, BARE_JSON, BRACKETED, BRACKETED_ARGS, BRACKETED_SPACED, PYTHONIC)
each_format = pytest.mark.parametrize("calls", FORMATS, ids=lambda calls: calls.name)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = (
    Function("get", prepare(WEATHER)),
    Function("get_all", prepare({"type": "object", "additionalProperties": False})),
)
GET = ("get", {"city": "Bonn", "exact": True})
ALL: tuple[str, dict[str, Any]] = ("get_all", {})


def grammar(
    calls: CallFormat, *, required: bool = False, parallel: bool = True, think: ReasoningMarks | None = None
) -> str:
    made = builder()
    rule = calls_rule(made, calls, CallRules(FUNCTIONS, required, parallel))
    return made.build(after_reasoning(made, think, rule))


@each_format
def test_auto_takes_text_or_calls(calls: CallFormat) -> None:
    made = grammar(calls)
    assert accepts(made, "")
    assert accepts(made, "It is 3 < 4, and [so] on {}.")
    assert accepts(made, calls.write([GET]))
    assert accepts(made, calls.write([GET, ALL, GET]))


@pytest.mark.parametrize("calls", [c for c in FORMATS if c.after_text], ids=lambda calls: calls.name)
def test_auto_takes_text_and_then_calls(calls: CallFormat) -> None:
    assert accepts(grammar(calls), "One moment.\n" + calls.write([ALL]))


@each_format
def test_a_call_that_has_begun_is_one_of_a_declared_function_with_its_arguments(calls: CallFormat) -> None:
    made = grammar(calls)
    assert not begins(made, calls.write([("other", {})]))
    assert not begins(made, calls.write([("get", {"town": "Bonn"})]))
    assert not begins(made, calls.write([("get", {"city": 5})]))
    assert not begins(made, calls.write([("get", {})]))
    assert not begins(made, calls.write([("get_all", {"city": "Bonn"})]))


@each_format
def test_required_takes_calls_only(calls: CallFormat) -> None:
    made = grammar(calls, required=True)
    assert accepts(made, calls.write([GET, ALL]))
    assert not accepts(made, "")
    assert not begins(made, "Hello")


@each_format
def test_without_parallel_calls_there_is_one(calls: CallFormat) -> None:
    made = grammar(calls, parallel=False)
    assert accepts(made, calls.write([GET]))
    assert not begins(made, calls.write([GET, ALL]))


@each_format
@pytest.mark.parametrize("inside", [False, True])
def test_reasoning_is_free_and_the_rules_begin_after_it(calls: CallFormat, inside: bool) -> None:
    made = grammar(calls, required=True, think=ReasoningMarks("<think>", "</think>", inside))
    begin = "" if inside else "<think>"
    assert accepts(made, f"{begin}Hm, {{[<tool_call> I'd call.</think>\n\n" + calls.write([GET]))
    assert not begins(made, f"{begin}Hm</think>Hello")
    assert accepts(made, calls.write([GET])) is not inside


@each_format
def test_the_number_of_calls_is_bounded(calls: CallFormat) -> None:
    made = grammar(calls)
    assert accepts(made, calls.write([ALL] * MAX_CALLS))
    assert not begins(made, calls.write([ALL] * (MAX_CALLS + 1)))


def test_keyword_arguments_keep_their_order_and_may_be_left_out() -> None:
    made = grammar(PYTHONIC, required=True)
    assert accepts(made, '[get(city="x", days=3, exact=False)]')
    assert accepts(made, '[get(city="x", exact=True)]')
    assert not begins(made, "[get(days=3)")
    assert not begins(made, '[get(city="x", exact=true')


def test_a_control_token_may_open_a_llama_call() -> None:
    assert accepts(grammar(BARE_JSON), "<|python_tag|>" + BARE_JSON.write([ALL]))


@pytest.mark.parametrize(
    ("template", "calls"),
    [
        ('{% if tools %}<tools>…<tool_call>\\n{"name": …{% endif %}', HERMES),
        ("{% if tools %}<tool_call>\n<function=…{% endif %}", GENERIC),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [", BRACKETED_SPACED),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS][", BRACKETED),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]{{ name }}[ARGS]", BRACKETED_ARGS),
        ('<|start_header_id|>{{ tools }}\'{"name": "\' + \'"parameters": \'', BARE_JSON),
        ("<start_of_turn>{{ message }}", PYTHONIC),
        ("<|im_start|>{{ message }}", GENERIC),
    ],
)
def test_the_format_is_told_from_the_template(template: str, calls: CallFormat) -> None:
    assert format_of_template({"default": template}) == calls


@pytest.mark.parametrize("calls", [c for c in FORMATS if not c.in_template], ids=lambda calls: calls.name)
def test_instructions_name_the_tools_and_show_a_call(calls: CallFormat) -> None:
    text = instructions(calls, [{"name": "get", "description": "Wetter für heute"}])
    assert '{"name": "get", "description": "Wetter für heute"}' in text
    assert calls.write([("the_function", {"some_argument": "its value"})]).removesuffix(")]") in text


def test_reasoning_is_told_from_template_and_prompt() -> None:
    sources = {"default": "… </think> …"}
    assert reasoning_of(sources, "assistant\n") == ReasoningMarks("<think>", "</think>", open=False)
    assert reasoning_of(sources, "assistant\n<think>\n") == ReasoningMarks("<think>", "</think>", open=True)
    assert reasoning_of(sources, "assistant\n<think>\n\n</think>\n\n") is None
    assert reasoning_of({"default": "plain"}, "assistant\n<think>") is None
