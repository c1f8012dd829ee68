"""Chat messages to prompt text through the model's Jinja template.

The environment is the one that Hugging Face's templates are written for (`apply_chat_template` of the
transformers library): the same sandbox, white-space rules, functions and message clean-up, so that prompts are
equal to the character. Beyond it, a rendering is bounded in time and size, because messages come from clients.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from time import thread_time
from typing import Any, Final

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

_TICK: Final = "__tick__"  # what loops and macros call, to notice that time is up
_TICKS_PER_CLOCK: Final = 64
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(Exception):
    """The messages do not fit the template, or the template is at fault; the message is fit for the client."""


class ChatTemplate:
    """A model's chat template, compiled. Immutable and safe to use from several threads."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_texts: Mapping[str, str],
        *,
        max_seconds: float = 5.0,
        max_characters: int = 32 << 20,
    ) -> None:
        """`sources` by name: "default" and, if the model has one for requests with tools, "tool_use".
        `special_texts`: bos_token, eos_token, … as the template's variables. A rendering may take `max_seconds` of
        processor time and produce `max_characters`. Raises ChatTemplateError if a source is no valid template."""
        environment = _Environment()
        self._templates: Final = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except (TemplateSyntaxError, RecursionError) as error:
                raise ChatTemplateError(f"the chat template {name!r} is not valid: {error}") from error
        self._special_texts: Final = dict(special_texts)
        self._max_seconds: Final = max_seconds
        self._max_characters: Final = max_characters
        self.sources: Final[Mapping[str, str]] = dict(sources)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for the messages, BOS included where the template writes it: encode it without special tokens.

        `add_generation_prompt` opens the assistant's turn; `continue_final_message` leaves the last message's turn
        open instead, so that the answer continues it. `template_kwargs` are further variables of the template.
        Raises ChatTemplateError.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
        cleaned = [_cleaned(message) for message in messages]
        mark = ""
        if continue_final_message:
            mark = _mark_end(cleaned)
        budget = _Budget(self._max_seconds, self._max_characters)
        variables = {
            **self._special_texts,
            **(template_kwargs or {}),
            "messages": cleaned,
            "tools": list(tools) if tools is not None else None,
            "documents": list(documents) if documents is not None else None,
            "add_generation_prompt": add_generation_prompt,
            _TICK: budget.tick,
        }
        text = self._render(self._source_name(tools), variables, budget)
        return _cut_at(text, mark) if mark else text

    def _source_name(self, tools: object) -> str:
        if tools is not None and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        raise ChatTemplateError(f"the model has several chat templates and no default: {', '.join(self._templates)}")

    def _render(self, name: str, variables: Mapping[str, Any], budget: _Budget) -> str:
        parts = []
        try:
            for part in self._templates[name].generate(variables):
                budget.spend(len(part))
                parts.append(part)
        except ChatTemplateError:
            raise
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses the messages: {error.message}") from error
        except RecursionError as error:
            raise ChatTemplateError("the chat template recurses too deeply") from error
        except Exception as error:  # templates take messages apart with Python's operators; any of them may fail
            raise ChatTemplateError(f"the chat template cannot take these messages: {error}") from error
        return "".join(parts)


class _Budget:
    """What is left of one rendering's time and size."""

    def __init__(self, max_seconds: float, max_characters: int) -> None:
        self._max_seconds = max_seconds
        self._deadline = thread_time() + max_seconds
        self._max_characters = max_characters
        self._characters = 0
        self._ticks = 0

    def tick(self) -> str:
        self._ticks += 1
        if self._ticks % _TICKS_PER_CLOCK == 0 and thread_time() > self._deadline:
            raise ChatTemplateError(f"rendering the chat template took more than {self._max_seconds:g} s")
        return ""

    def spend(self, characters: int) -> None:
        self._characters += characters
        if self._characters > self._max_characters:
            raise ChatTemplateError(f"the rendered prompt has more than {self._max_characters} characters")
        self.tick()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        bodies = [node.body for node in tree.find_all(nodes.For)]
        bodies += [node.body for node in tree.find_all(nodes.Macro)]
        bodies += [node.body for node in tree.find_all(nodes.CallBlock)]
        for body in bodies:
            body.insert(0, nodes.ExprStmt(nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Repetition and powers stay within bounds: one operation must not fill the memory."""
        size = max((len(side) for side in (left, right) if isinstance(side, (str, list, tuple))), default=0)
        count = max((abs(side) for side in (left, right) if isinstance(side, (int, float))), default=0)
        if size * count > 1_000_000 or (operator == "**" and count > 1000):
            raise ChatTemplateError("the chat template makes a value that is too large")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's text for training; here it only encloses it."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Any) -> str:
        text: str = caller()
        return text


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter, this one escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


# Messages


def _cleaned(message: Message) -> dict[str, Any]:
    """The message as templates expect it: no key without a value, and reasoning under each of its names."""
    cleaned = {key: value for key, value in message.items() if value is not None}
    reasoning = next((cleaned[key] for key in _REASONING_KEYS if key in cleaned), None)
    if reasoning is None:
        return cleaned
    return {"thinking": reasoning, **cleaned, "reasoning_content": reasoning}


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Append a mark to the last message's text, in place; returns the mark. It ends in a space, to notice whether the
    template trims the text."""
    mark = f"END{secrets.token_hex(8)} "
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + mark
        return mark
    parts = [dict(part) for part in content] if isinstance(content, list) else []
    for part in reversed(parts):
        if isinstance(part.get("text"), str):
            part["text"] += mark
            messages[-1]["content"] = parts
            return mark
    raise ChatTemplateError("continue_final_message needs a last message with text")


def _cut_at(text: str, mark: str) -> str:
    place = text.rfind(mark.rstrip())
    if place < 0:
        raise ChatTemplateError("the chat template leaves the final message out, so it cannot be continued")
    trimmed = not text.startswith(mark, place)
    return text[:place].rstrip() if trimmed else text[:place]
