"""Tokens that mean something by their text, in vocabularies that do not say what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

# Texts that end a turn or a document, where the vocabulary has them as special tokens.
END_TEXTS: Final = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|EOT|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<turn|>",
    "[EOT]",
    "[EOS]",
    "<eos>",
    "</s>",
)

# In vocabularies with the texts on the right (the harmony format), <|end|> closes a message, not the turn.
_MESSAGE_END: Final = "<|end|>"
_TURN_ENDS: Final = ("<|return|>", "<|call|>")

_FILL_TEXTS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)


@dataclass(frozen=True, slots=True)
class FillTokens:
    """The control tokens of fill-in-the-middle: prefix, text before, suffix, text after, middle, answer."""

    prefix: int
    suffix: int
    middle: int


def end_token_ids(special_id: Callable[[str], int | None]) -> set[int]:
    """Ids of the well-known end texts; `special_id` gives the id of a special token by its text."""
    ids = {text: found for text in END_TEXTS if (found := special_id(text)) is not None}
    if all(text in ids for text in _TURN_ENDS):
        ids.pop(_MESSAGE_END, None)
    return set(ids.values())


def fill_tokens(token_id: Callable[[str], int | None], declared: Mapping[str, int]) -> FillTokens | None:
    """The fill-in-the-middle tokens that the model's files declare (keys prefix, suffix, middle), else those
    found by their text, else None."""
    if {"prefix", "suffix", "middle"} <= declared.keys():
        return FillTokens(declared["prefix"], declared["suffix"], declared["middle"])
    for texts in _FILL_TEXTS:
        ids = [token_id(text) for text in texts]
        if None not in ids:
            return FillTokens(*[found for found in ids if found is not None])
    return None
