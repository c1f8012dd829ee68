"""Prompts of a stated number of tokens, made of common English words."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from random import Random

from loadtest.counters import TokenCounter
from loadtest.errors import BenchError

_FIRST = "the"  # every prompt begins with it: a first word has no space in front and might be cut differently


def load_words() -> tuple[str, ...]:
    """The bundled list: some 1,500 common English words, lower case, alphabetical."""
    return tuple(resources.files("loadtest").joinpath("words.txt").read_text("ascii").split())


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes texts of an exact length without asking the tokenizer again: only words that cost one token each,
    and a known number of special tokens in front."""

    words: tuple[str, ...]
    num_special_tokens: int
    counted_by: str

    def text(self, num_tokens: int, rng: Random) -> str:
        """A text of `num_tokens` tokens. Raises BenchError if the special tokens alone are as many."""
        return self.extend("", num_tokens, rng)

    def extend(self, prefix: str, num_tokens: int, rng: Random) -> str:
        """`prefix` (made by this maker, or "") followed by words, `num_tokens` tokens in all."""
        start = prefix.split() or [_FIRST]
        missing = num_tokens - self.num_special_tokens - len(start)
        if missing < 0:
            raise BenchError(f"cannot make a prompt of {num_tokens} tokens: it starts with {len(start)} words")
        return " ".join([*start, *rng.choices(self.words, k=missing)])


def make_prompt_maker(counter: TokenCounter) -> PromptMaker:
    """Learns from the counter which words are single tokens; a few dozen counts at most where nearly all are."""
    base = counter.count(_FIRST)

    def single(part: tuple[str, ...]) -> tuple[str, ...]:
        if counter.count(" ".join((_FIRST, *part))) - base == len(part):
            return part
        if len(part) == 1:
            return ()
        middle = len(part) // 2
        return single(part[:middle]) + single(part[middle:])

    words = single(load_words())
    if not words:
        raise BenchError(f"no word of the bundled list is a single token ({counter.name})")
    return PromptMaker(words, base - 1, counter.name)
