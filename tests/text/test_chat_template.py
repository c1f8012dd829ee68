"""Chat templates render as transformers renders them, safely and within bounds."""

from __future__ import annotations

from pathlib import Path
from time import thread_time
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from server.text.chat_template import ChatTemplate, ChatTemplateError
from server.text.loading import load_tokenizer

_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

_PLAIN_TURNS = """{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
<|system|>
Be helpful.<|end|>
    {% endif %}
<|{{ message['role'] }}|>
{{ message['content'] }}<|end|>
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}"""

_ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if message.role == 'user' %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}
{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"""

_WITH_TOOLS = """{%- set ns = namespace(last=-1, seen=[]) -%}
{%- macro describe(tool, indent=0) -%}
{{ '  ' * indent }}{{ tool.function.name }}: {{ tool | tojson }}
{%- endmacro -%}
{%- if tools is not none %}{% for tool in tools %}{{ describe(tool, loop.index0) }}
{{ tool.function.parameters | tojson(indent=2) }}
{% endfor %}{% endif -%}
{%- for message in messages %}
{%- if message.role == 'tool' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if message.tool_calls is defined %}
{%- for call in message.tool_calls %}
<call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson(ensure_ascii=False) }}</call>
{%- endfor %}
{%- elif message.content is string %}
{{ message.role }}={{ message.content }}
{%- else %}
{%- for part in message.content if part.type == 'text' %}{{ part.text }}|{% endfor %}
{%- endif %}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{{ message.thinking }}{% endif %}
{%- endfor %}
last={{ ns.last }} {{ documents | length if documents else 'no' }} documents
{%- for n in range(9) %}{% if n == 2 %}{% continue %}{% elif n == 5 %}{% break %}{% endif %} {{ n }}{% endfor %}
{%- generation %}{% if add_generation_prompt %}
assistant={% endif %}{% endgeneration %}{{ strftime_now('%Y-%m-%d') }}{{ extra | default('none') }}"""

_TEMPLATES = {"turns": _PLAIN_TURNS, "alternating": _ALTERNATING, "tools": _WITH_TOOLS}

_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The <b>weather</b> & "more" in Köln\'s streets',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
_CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "Hi <|x|> & <b>"}],
    "with system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi  "},
        {"role": "assistant", "content": "Hello "},
        {"role": "user", "content": "Bye\n"},
    ],
    "ends with assistant": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is  "}],
    "user twice": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "again"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    "tool call": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 °C"},
    ],
    "reasoning": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning": "hmm", "content": "a"},
        {"role": "user", "content": "q2"},
    ],
    "empty": [],
}


_OPTIONS: tuple[dict[str, Any], ...] = (
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
)


def _reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers renders; None where it refuses."""
    try:
        conversation = [
            {k: v for k, v in message.items() if v is not None} for message in messages
        ]  # as its caller does
        rendered, _ = render_jinja_template([conversation], chat_template=source, **_SPECIAL, **options)
    except Exception:
        return None
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("conversation", _CONVERSATIONS)
@pytest.mark.parametrize("name", _TEMPLATES)
def test_renders_as_transformers_does(name: str, conversation: str) -> None:
    template = ChatTemplate({"default": _TEMPLATES[name]}, _SPECIAL)
    messages = _CONVERSATIONS[conversation]
    for tools in (None, _TOOLS):
        for options in _OPTIONS:
            expected = _reference(_TEMPLATES[name], messages, tools=tools, **options)
            if expected is None:
                with pytest.raises(ChatTemplateError):
                    template.render(messages, tools=tools, **options)
            else:
                assert template.render(messages, tools=tools, **options) == expected


def test_the_default_models_template_equals_apply_chat_template(
    default_model_path: Path, default_model_oracle: PreTrainedTokenizerFast
) -> None:
    loaded = load_tokenizer(default_model_path)
    assert loaded.chat_template is not None
    for messages in (_CONVERSATIONS["one turn"], _CONVERSATIONS["with system"], _CONVERSATIONS["ends with assistant"]):
        for add_generation_prompt in (True, False):
            text = loaded.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
            ids = loaded.tokenizer.encode(text, add_special_tokens=False)
            expected = default_model_oracle.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
            assert ids == expected["input_ids"]


def test_template_kwargs_and_documents_are_variables() -> None:
    template = ChatTemplate({"default": _WITH_TOOLS}, _SPECIAL)
    messages = _CONVERSATIONS["one turn"]
    documents = [{"title": "t", "text": "x"}]
    expected = _reference(_WITH_TOOLS, messages, documents=documents, extra="more", add_generation_prompt=True)
    assert template.render(messages, documents=documents, template_kwargs={"extra": "more"}) == expected


def test_kwargs_cannot_replace_the_messages() -> None:
    template = ChatTemplate({"default": "{{ messages | length }}{{ add_generation_prompt }}"}, {})
    assert template.render([{"role": "user", "content": "x"}], template_kwargs={"messages": []}) == "1True"


def test_a_model_may_have_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"}, {})
    assert template.render([]) == "plain"
    assert template.render([], tools=_TOOLS) == "with tools"
    with pytest.raises(ChatTemplateError, match="no default: rag"):
        ChatTemplate({"rag": "x"}, {}).render([])


def test_the_messages_stay_as_they_were() -> None:
    template = ChatTemplate({"default": _PLAIN_TURNS}, _SPECIAL)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "An", "name": None},
    ]
    template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "An", "name": None}]


def test_continuing_leaves_the_last_turn_open() -> None:
    template = ChatTemplate({"default": _PLAIN_TURNS}, _SPECIAL)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|assistant|>\nThe answer is ")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "needs a last message with text"),
        ([{"role": "assistant", "content": None}], "needs a last message with text"),
        ([{"role": "assistant", "content": [{"type": "image_url"}]}], "needs a last message with text"),
    ],
)
def test_only_text_can_be_continued(messages: list[dict[str, Any]], reason: str) -> None:
    template = ChatTemplate({"default": _PLAIN_TURNS}, _SPECIAL)
    with pytest.raises(ChatTemplateError, match=reason):
        template.render(messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        template.render([{"role": "assistant", "content": "a"}], continue_final_message=True)


# Refusals


def test_a_templates_own_refusal_reaches_the_client() -> None:
    template = ChatTemplate({"default": _ALTERNATING}, _SPECIAL)
    with pytest.raises(ChatTemplateError, match="Conversation roles must alternate"):
        template.render(_CONVERSATIONS["user twice"])


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}", [{"role": "user", "content": [1]}]),
        ("{{ messages[0].missing.deeper }}", [{"role": "user", "content": "a"}]),
        ("{{ 1 // 0 }}", []),
        ("{{ messages | sort }}", [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]),
    ],
)
def test_messages_that_the_template_cannot_take_are_an_error_of_ours(source: str, messages: list[Any]) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template"):
        ChatTemplate({"default": source}, {}).render(messages)


def test_a_template_that_is_no_template_is_refused_with_its_name() -> None:
    with pytest.raises(ChatTemplateError, match="the chat template 'default' is not valid"):
        ChatTemplate({"default": "{% if x %}"}, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set x = messages.__class__ %}{{ x.__name__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include 'other' %}",
    ],
)
def test_the_sandbox_gives_nothing_away(source: str) -> None:
    try:
        text = ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "a"}])
    except ChatTemplateError:
        return
    assert text == ""


# Bounds


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}",
    ],
)
def test_a_rendering_that_takes_too_long_is_stopped(source: str) -> None:
    template = ChatTemplate({"default": source}, {}, max_seconds=0.2)
    start = thread_time()
    with pytest.raises(ChatTemplateError, match=r"took more than 0\.2 s"):
        template.render([{"role": "user", "content": "a"}] * 2000)
    assert thread_time() - start < 2.0


def test_a_rendering_that_grows_too_large_is_stopped() -> None:
    template = ChatTemplate({"default": "{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}"}, {})
    with pytest.raises(ChatTemplateError, match="the rendered prompt has more than"):
        template.render([{"role": "user", "content": "x" * 10_000}])


@pytest.mark.parametrize(
    "source", ["{{ 'a' * 999999999 }}", "{{ [1] * 999999999 }}", "{{ 9 ** 999999 }}", "{{ 999999999 * 'ab' }}"]
)
def test_one_operation_cannot_fill_the_memory(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="too large"):
        ChatTemplate({"default": source}, {}).render([])


def test_a_macro_without_end_is_an_error() -> None:
    with pytest.raises(ChatTemplateError, match="recurses too deeply"):
        ChatTemplate({"default": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"}, {}).render([])
