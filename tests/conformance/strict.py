"""Whether an answer is exactly what a client's own types say: nothing missing, nothing of another type, nothing that
the types do not know but for what docs/api.md tells of."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeVar

from pydantic import BaseModel, ValidationError

Answer = TypeVar("Answer", bound=BaseModel)

# Fields that the clients' types do not have, by the type that carries them.
EXTENSIONS: dict[str, frozenset[str]] = {
    "openai.Model": frozenset({"root", "max_model_len"}),
    "openai.Response": frozenset({"store"}),
    "openai.ParsedResponse": frozenset({"store"}),
}
# Where the API sends null though the client's types do not say so: in a stream of completions, and for the first
# token of an echoed prompt, which has no logprob.
NULLS = frozenset(
    {"choices[].finish_reason", "choices[].logprobs.token_logprobs[]", "choices[].logprobs.top_logprobs[]"}
)


def checked(answer: Answer, extensions: Collection[str] = ()) -> Answer:
    """The answer as it is. Fails if its type does not know all of its fields, or would not have parsed it strictly.

    `answer`: from a client that does not convert what it gets (for the openai and anthropic clients: by default).
    `extensions`: paths of fields that this request asked for beyond the API, as `choices[].token_ids`.
    """
    unknown = [path for path in _unknown(answer, "") if path not in extensions]
    assert unknown == [], f"{type(answer).__name__}: unknown fields {unknown}"
    try:
        type(answer).model_validate_json(
            answer.model_dump_json(by_alias=True, exclude_unset=True, warnings=False), strict=True
        )
    except ValidationError as error:
        faults = [fault for fault in error.errors() if fault["input"] is not None or _path(fault["loc"]) not in NULLS]
        assert faults == [], f"{type(answer).__name__}: {faults}"
    return answer


def _unknown(value: object, path: str) -> Iterator[str]:
    """Paths of fields that the types do not know; items of lists share one path: choices[].token_ids."""
    if isinstance(value, BaseModel):
        kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
        yield from (path + name for name in value.model_extra or () if name not in EXTENSIONS.get(kind, ()))
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name, None), f"{path}{name}.")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _unknown(item, f"{path.removesuffix('.')}[].")


def _path(location: tuple[int | str, ...]) -> str:
    return "".join("[]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
