"""The fields that ask for an answer in a form: OpenAI's, then those of other servers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from server.protocol.common import JsonObject, RequestModel, Strings


class ConstraintFields(RequestModel):
    """At most one of them. docs/structured-output.md says what of JSON Schema is enforced."""

    response_format: JsonObject | None = Field(
        None, description="text, json_object, json_schema (enforced, strict or not), regex. One form of answer at most."
    )
    structured_outputs: JsonObject | None = Field(
        None,
        description="One of json, regex, choice, grammar, json_object; disable_any_whitespace, whitespace_pattern.",
    )
    guided_json: Annotated[JsonObject | str | None, Field(union_mode="left_to_right")] = Field(
        None, description="A JSON schema."
    )
    guided_regex: str | None = Field(None, description="A regular expression, of the whole answer.")
    guided_choice: Strings | None = Field(None, description="Texts, of which the answer is one.")
    guided_grammar: str | None = Field(None, description="A grammar, in Lark or GBNF.")
    json_schema: Annotated[JsonObject | str | None, Field(union_mode="left_to_right")] = Field(
        None, description="As guided_json."
    )
    regex: str | None = Field(None, description="As guided_regex.")
    ebnf: str | None = Field(None, description="As guided_grammar.")
    grammar: str | None = Field(None, description="As guided_grammar.")
