"""How long a step gets: a budget beside the one in tokens, in units that the executor chooses."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step of n tokens costs per_step + n · per_token + per_key for each key that one of its tokens attends to.

    Decodes run whatever they cost: chunks of prompts share what they leave of `limit`, and never less than a quarter
    of it, so that prompts get on beside any number of decodes.
    """

    limit: int
    per_step: int
    per_token: int
    per_key: int

    def for_chunks(self, decode_lengths: list[int]) -> int:
        """What decodes of sequences of so many tokens leave."""
        decodes = len(decode_lengths) * self.per_token + sum(decode_lengths) * self.per_key
        return max(self.limit - self.per_step - decodes, self.limit // 4)

    def of_chunk(self, start: int, num_tokens: int) -> int:
        """Of tokens at positions start … start + num_tokens − 1 of one sequence."""
        keys = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return num_tokens * self.per_token + keys * self.per_key

    def fitting(self, start: int, left: int) -> int:
        """The most tokens from `start` on that cost no more than `left`."""
        if left <= 0:
            return 0
        if self.per_key == 0:
            return left // max(1, self.per_token)
        a = self.per_key  # a n² + b n ≤ 2 · left
        b = 2 * self.per_token + self.per_key * (2 * start + 1)
        return (isqrt(b * b + 8 * a * left) - b) // (2 * a)
