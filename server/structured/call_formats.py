"""How models write tool calls. Each format is data: the texts around a call's name and its arguments.

    begin  before_name NAME before_arguments ARGUMENTS after_arguments  between  before_name NAME …  end

The format is that of the model's chat template, told by marks that only the templates of its family have. A model whose
template knows no tools, or calls in a way that is none of these, is told the generic format in its system message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from server.protocol.common import JsonObject


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The texts of one format. `trigger` is what a call begins with, and text does not."""

    name: str
    trigger: str
    before_name: str
    before_arguments: str
    after_arguments: str
    begin: str = ""
    between: str = ""
    end: str = ""
    arguments: Literal["json", "python"] = "json"  # an object, or keyword arguments
    after_text: bool = True  # text may come before a call; else the answer's first character decides
    optional_begin: str = ""  # a control token that some models put before all
    single: bool = False  # the template takes one call in an answer, no more
    id_chars: int | None = None  # the template insists on ids of this length
    in_template: bool = True  # the template describes tools and writes calls and results itself

    def write(self, calls: Sequence[tuple[str, JsonObject]]) -> str:
        """Calls as the model would have written them."""
        texts = [
            self.before_name + name + self.before_arguments + self._arguments(values) + self.after_arguments
            for name, values in calls
        ]
        return self.begin + self.between.join(texts) + self.end

    def _arguments(self, values: JsonObject) -> str:
        if self.arguments == "json":
            return json.dumps(values, ensure_ascii=False)
        return ", ".join(f"{name}={python_literal(value)}" for name, value in values.items())


def python_literal(value: object) -> str:
    """A JSON value in Python's spelling, strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(python_literal, value))}]"
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key, ensure_ascii=False)}: {python_literal(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    return repr(value)


_HERMES_MARKS: Final[Mapping[str, str]] = {
    "trigger": "<tool_call>",
    "before_name": '<tool_call>\n{"name": "',
    "before_arguments": '", "arguments": ',
    "after_arguments": "}\n</tool_call>",
    "between": "\n",
}
HERMES: Final = CallFormat("hermes", **_HERMES_MARKS)  # type: ignore[arg-type]  # texts only
GENERIC: Final = CallFormat("generic", in_template=False, **_HERMES_MARKS)  # type: ignore[arg-type]
BARE_JSON: Final = CallFormat(
    "bare-json",
    trigger="{",
    before_name='{"name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    between="; ",
    after_text=False,
    optional_begin="<|python_tag|>",
    single=True,
)
_BRACKETED_MARKS: Final[Mapping[str, str]] = {
    "trigger": "[TOOL_CALLS]",
    "before_name": '{"name": "',
    "before_arguments": '", "arguments": ',
    "after_arguments": "}",
    "between": ", ",
    "end": "]",
}
BRACKETED: Final = CallFormat("bracketed", begin="[TOOL_CALLS][", id_chars=9, **_BRACKETED_MARKS)  # type: ignore[arg-type]
BRACKETED_SPACED: Final = CallFormat("bracketed", begin="[TOOL_CALLS] [", id_chars=9, **_BRACKETED_MARKS)  # type: ignore[arg-type]
BRACKETED_ARGS: Final = CallFormat(
    "bracketed-args",
    trigger="[TOOL_CALLS]",
    before_name="[TOOL_CALLS]",
    before_arguments="[ARGS]",
    after_arguments="",
    id_chars=9,
)
PYTHONIC: Final = CallFormat(
    "pythonic",
    trigger="[",
    begin="[",
    before_name="",
    before_arguments="(",
    after_arguments=")",
    between=", ",
    end="]",
    arguments="python",
    after_text=False,
    in_template=False,
)


def format_of_template(sources: Mapping[str, str]) -> CallFormat:
    """The format that a model's templates are written for."""
    source = sources.get("tool_use") or sources.get("default", "")
    if "[TOOL_CALLS]" in source and "tools" in source:
        if "[ARGS]" in source:
            return BRACKETED_ARGS
        return BRACKETED_SPACED if "[TOOL_CALLS] [" in source else BRACKETED
    if "<tool_call>" in source and "tools" in source and "<function=" not in source and "<arg_key>" not in source:
        return HERMES
    if "<|start_header_id|>" in source and '"parameters": ' in source and "tools" in source:
        return BARE_JSON
    if "<start_of_turn>" in source and "tools" not in source:
        return PYTHONIC
    return GENERIC


# What a model is told whose template does not tell it.

_TOOLS: Final = """You can call functions. These are the functions, one JSON object a line:
<tools>
{tools}
</tools>
"""
_HOW: Final = {
    "generic": """To call one, answer with its name and its arguments as JSON between these tags:
<tool_call>
{"name": "the_function", "arguments": {"some_argument": "its value"}}
</tool_call>""",
    "pythonic": """To call some, answer with a list of calls and nothing else:
[the_function(some_argument="its value", other_argument=2), other_function()]""",
}
_RESULTS: Final = (
    "The results come back between <tool_response> and </tool_response>. Call a function only where it helps."
)


def instructions(calls: CallFormat, tools: Sequence[JsonObject]) -> str:
    """What a system message says about the tools; each is a wire tool's `function`."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"{_TOOLS.replace('{tools}', lines)}{_HOW[calls.name]}\n{_RESULTS}"


def tool_response(text: str) -> str:
    """A result as a message of the user, for templates without a role for it."""
    return f"<tool_response>\n{text}\n</tool_response>"
