"""What the runner keeps for one sequence between steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.constraints.matching import Matching
from engine.types import GenerationRequest, SamplingParams

Tokens = npt.NDArray[np.int32]
_NO_TOKENS: Tokens = np.empty(0, np.int32)
_NO_TOKENS.flags.writeable = False


class SequenceState:
    """The record that came with the sequence, its outputs so far, and what follows from both for the next draw.

    `slot` is its row in the persistent tables. The outputs grow by add_output() alone.
    """

    __slots__ = ("edits", "last_token", "matching", "output_token_ids", "pool_sum", "record", "slot")

    def __init__(self, record: GenerationRequest, slot: int) -> None:
        self.record = record
        self.slot = slot
        self.output_token_ids = list(record.output_token_ids)
        self.last_token = -1  # drawn by the latest step; what PENDING_TOKEN stands for in the next one
        self.edits = LogitEdits(record) if _edits_logits(record) else None
        self.matching: Matching | None = None  # where it stands in its grammar
        self.pool_sum: npt.NDArray[np.float64] | None = None  # [H], sum of the hidden states so far

    def add_output(self, token_id: int) -> None:
        """Take a token drawn for this sequence."""
        self.output_token_ids.append(token_id)
        self.last_token = token_id
        if self.edits is not None:
            self.edits.add_output(token_id)

    def banned_tokens(self) -> Tokens:
        """Tokens that the next draw must not give, ascending."""
        return _NO_TOKENS if self.edits is None else self.edits.banned_tokens(self)

    def may_draw(self, mask: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        """Per token, 1 if the next draw may give it by the mask of the sequence's grammar and by its own masks."""
        may = np.unpackbits(mask.view(np.uint8), bitorder="little")
        if self.edits is not None and len(self.edits.allowed):
            others = np.ones(len(may), bool)
            others[self.edits.allowed] = False
            may[others] = 0
        may[self.banned_tokens()] = 0
        return may


def _edits_logits(record: GenerationRequest) -> bool:
    """Whether anything stands between the raw logits and the draw's own parameters."""
    sampling = record.sampling
    return bool(
        sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.logit_bias
        or (sampling.min_tokens > 0 and record.stop_token_ids)
        or _has_penalties(sampling)
    )


def _has_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


class LogitEdits:
    """One sequence's masks, bias and penalties, ready to be laid beside those of others."""

    __slots__ = ("_bad_sequences", "_bad_tokens", "_bad_tokens_and_stops", "_record", "allowed", "bias", "counts")

    def __init__(self, record: GenerationRequest) -> None:
        sampling = record.sampling
        self._record = record
        self.allowed = _ascending(sampling.allowed_token_ids or ())
        self._bad_tokens = _ascending([word[0] for word in sampling.bad_words if len(word) == 1])
        self._bad_tokens_and_stops = np.union1d(self._bad_tokens, _ascending(record.stop_token_ids))
        self._bad_sequences = tuple(word for word in sampling.bad_words if len(word) > 1)
        self.bias = _merge_bias(sampling.logit_bias)
        self.counts = TokenCounts(record) if _has_penalties(sampling) else None

    def add_output(self, token_id: int) -> None:
        if self.counts is not None:
            self.counts.add_output(token_id)

    def banned_tokens(self, state: SequenceState) -> Tokens:
        """Stop tokens before min_tokens, and the last token of every bad word whose others stand at the end."""
        outputs = state.output_token_ids
        early = len(outputs) < self._record.sampling.min_tokens
        banned = self._bad_tokens_and_stops if early else self._bad_tokens
        completing = [word[-1] for word in self._bad_sequences if self._ends_with(word[:-1], outputs)]
        return np.union1d(banned, _ascending(completing)) if completing else banned

    def _ends_with(self, tail: tuple[int, ...], outputs: list[int]) -> bool:
        """Whether prompt and outputs together end with `tail`."""
        from_outputs = outputs[-len(tail) :]
        missing = len(tail) - len(from_outputs)
        from_prompt = self._record.prompt_token_ids[-missing:] if missing else ()
        return (*from_prompt, *from_outputs) == tail


class TokenCounts:
    """The distinct tokens of prompt and outputs with their number among the outputs, kept as outputs come."""

    __slots__ = ("_counts", "_places", "_token_ids")

    def __init__(self, record: GenerationRequest) -> None:
        # without a repetition penalty the tokens of the prompt weigh nothing
        prompt = record.prompt_token_ids if record.sampling.repetition_penalty != 1.0 else ()
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        capacity = max(16, 2 * len(self._places))
        self._token_ids = np.zeros(capacity, np.int32)
        self._token_ids[: len(self._places)] = list(self._places)
        self._counts = np.zeros(capacity, np.int32)
        for token_id in record.output_token_ids:
            self.add_output(token_id)

    def add_output(self, token_id: int) -> None:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[place] = token_id
        self._counts[place] += 1

    @property
    def token_ids(self) -> Tokens:
        return self._token_ids[: len(self._places)]

    @property
    def output_counts(self) -> npt.NDArray[np.int32]:
        return self._counts[: len(self._places)]


def _ascending(token_ids: Sequence[int]) -> Tokens:
    return np.array(sorted(set(token_ids)), np.int32)


def _merge_bias(bias: tuple[tuple[int, float], ...]) -> tuple[Tokens, npt.NDArray[np.float32]]:
    """Ids and values; of several values for one token the last counts."""
    merged = dict(bias)
    return np.array(list(merged), np.int32), np.array(list(merged.values()), np.float32)
