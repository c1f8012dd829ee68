"""Hooks for schemathesis: every second valid body is made one that this model can serve.

Bodies that are valid by the schema are mostly refused for their sense (an empty prompt, tools, a token that is not in
the vocabulary), and would never get as far as the engine. Bodies that are meant to be invalid stay as they are.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import schemathesis
from schemathesis import Case, GenerationMode, HookContext

VOCABULARY = 49_152
MAX_TOKENS = 24
TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids")
# Fields whose presence alone is refused, or that set the request a time it cannot keep.
DROPPED = (
    *("audio", "background", "chat_template", "chat_template_kwargs", "context_management", "conversation"),
    *("continue_final_message", "documents", "function_call", "functions", "include", "modalities", "model"),
    *("moderation", "previous_response_id", "prompt_cache_retention", "response_format", "service_tier", "store"),
    *("stream_options", "suffix", "text", "thinking", "timeout", "tool_choice", "tools", "truncation", "verbosity"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf", "grammar"),
    *("web_search_options", "add_generation_prompt", "best_of", "truncate_prompt_tokens", "reasoning"),
)
PROMPTS = ("prompt", "input", "system", "instructions")


@schemathesis.hook
def before_call(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    meta = case.meta
    if meta is None or meta.generation.mode is not GenerationMode.POSITIVE or not isinstance(case.body, dict):
        return
    if zlib.crc32(json.dumps(case.body, sort_keys=True).encode()) % 2:
        case.body = servable(case.body)


def servable(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what keeps it from being served; all else as it was drawn."""
    kept = {name: value for name, value in body.items() if name not in DROPPED}
    for name in set(PROMPTS) & kept.keys():
        kept[name] = _prompt(kept[name])
    if kept.get("messages"):
        kept["messages"] = [_message(message) for message in kept["messages"][:4]]
        kept["messages"][-1]["role"] = "user"
    for name in TOKEN_LISTS:
        if kept.get(name):
            kept[name] = [token % VOCABULARY for token in kept[name]]
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        if isinstance(kept.get(name), int):
            kept[name] = min(max(1, kept[name]), MAX_TOKENS)
    if isinstance(kept.get("logit_bias"), dict):
        kept["logit_bias"] = {
            str(index): max(-100, min(100, bias)) for index, bias in enumerate(kept["logit_bias"].values())
        }
    if isinstance(kept.get("stop"), list):
        kept["stop"] = [text for text in kept["stop"] if text][:4]
    if kept.get("n"):
        kept["n"] = min(kept["n"], 4)
    if kept.get("top_logprobs") is not None and "n" in kept:
        kept["logprobs"] = True
    kept["min_tokens"] = 0
    return kept


def _prompt(value: Any) -> Any:
    if isinstance(value, str):
        return value or "a"
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return [token % VOCABULARY for token in value]
    return "a"


def _message(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    return {"role": role if role in ("user", "assistant") else "user", "content": str(message.get("content"))}
