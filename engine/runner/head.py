"""The output head over chosen rows: draws and logprobs, a bounded tile of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.models.decoder import Decoder
from engine.runner.sampler import SamplingTable, token_logprobs
from engine.runner.sequence_state import SequenceState
from engine.types import TokenLogprobs
from kernels.interface import Array, DType, KernelSet

TILE_ROWS = 64  # rows of logits that exist at a time


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row whose logits tell about a token of the prompt, one position later."""

    plan_index: int  # of the sequence
    token_row: int  # among the step's tokens
    target: int  # the token that follows in the prompt
    top: int


class OutputHead:
    """Owns one tile of hidden states and logits."""

    def __init__(self, kernels: KernelSet, decoder: Decoder, table: SamplingTable) -> None:
        config = decoder.config
        self._kernels = kernels
        self._decoder = decoder
        self._table = table
        self._hidden = kernels.empty((TILE_ROWS, config.hidden_size), kernels.activation_dtype)
        self._logits = kernels.empty((TILE_ROWS, config.vocab_size), DType.FLOAT32)

    def draw(
        self, hidden: Array, rows: Array, states: Sequence[SequenceState], output_positions: Sequence[int]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """One token per row, −1 where none may be drawn, and its report where the sequence asked for one.

        `hidden` [T, H]; `rows` int32 [R] picks among them, one row per sequence.
        """
        tokens: list[int] = []
        reports: list[TokenLogprobs | None] = [None] * len(states)
        for first, last, logits in self._tiles(hidden, rows, len(states)):
            batch = self._table.batch(states[first:last], output_positions[first:last])
            tokens += self._kernels.sample(logits, batch).tolist()
            for start, stop in _runs_with_logprobs(states, tokens, first, last):
                tops = [state.record.sampling.logprobs or 0 for state in states[start:stop]]
                part = logits[start - first : stop - first]
                reports[start:stop] = token_logprobs(self._kernels, part, tokens[start:stop], tops)
        return tokens, reports

    def prompt_logprobs(self, hidden: Array, rows: Array, wanted: Sequence[PromptRow]) -> list[TokenLogprobs | None]:
        """The report of each wanted row (`rows` are their indices in `hidden`); None where the logits hold a NaN."""
        reports: list[TokenLogprobs | None] = []
        for first, last, logits in self._tiles(hidden, rows, len(wanted)):
            targets = [row.target for row in wanted[first:last]]
            reports += token_logprobs(self._kernels, logits, targets, [row.top for row in wanted[first:last]])
        return reports

    def _tiles(self, hidden: Array, rows: Array, num_rows: int) -> Iterator[tuple[int, int, Array]]:
        """(first row, end row, their logits); the logits are overwritten by the next tile."""
        for first in range(0, num_rows, TILE_ROWS):
            last = min(num_rows, first + TILE_ROWS)
            tile, logits = self._hidden[: last - first], self._logits[: last - first]
            self._kernels.gather_rows(hidden, rows[first:last], tile)
            self._decoder.logits(tile, logits)
            yield first, last, logits


def _runs_with_logprobs(
    states: Sequence[SequenceState], tokens: Sequence[int], first: int, last: int
) -> Iterator[tuple[int, int]]:
    """Stretches within [first, last) of sequences that asked for logprobs and got a token."""
    start: int | None = None
    for row in range(first, last):
        wanted = states[row].record.sampling.logprobs is not None and tokens[row] >= 0
        if wanted and start is None:
            start = row
        elif not wanted and start is not None:
            yield start, row
            start = None
    if start is not None:
        yield start, last
