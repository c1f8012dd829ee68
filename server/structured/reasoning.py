"""Whether and how a model thinks aloud before it answers, told from its template and from the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from server.structured.grammar import GrammarBuilder
from server.structured.parser import ReasoningMarks

_TAGS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def reasoning_of(sources: Mapping[str, str], prompt: str) -> ReasoningMarks | None:
    """The tags that the templates name; None if they name none, or if the prompt has closed the reasoning already:
    clients can turn it off."""
    for begin, end in _TAGS:
        if any(end in source for source in sources.values()):
            ending = prompt.rstrip()
            return None if ending.endswith(end) else ReasoningMarks(begin, end, open=ending.endswith(begin))
    return None


def after_reasoning(builder: GrammarBuilder, marks: ReasoningMarks | None, answer: str) -> str:
    """A rule's body: an answer with free reasoning before it."""
    if marks is None:
        return answer
    builder.rule("BLANKS", r"/\s{1,4}/")
    thinking = builder.rule("thinking", f"{builder.until('thought', marks.end)} BLANKS?")
    if marks.open:
        return f"{thinking} ({answer})"
    return f"({builder.literal(marks.begin)} {thinking})? ({answer})"
