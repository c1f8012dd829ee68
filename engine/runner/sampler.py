"""From sequences to the arrays that KernelSet.sample takes, and from its results to the engine's types."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.runner.sequence_state import LogitEdits, SequenceState
from engine.types import GenerationRequest, TokenLogprobs
from kernels.interface import Array, Csr, CsrValues, KernelSet, Penalties, SamplingBatch, TokenMask

LOWEST_LOGPROB = -9999.0  # stands for −inf, which JSON cannot say


class SamplingTable:
    """The parameters of all sequences by slot: written once a sequence, read by rows each step."""

    def __init__(self, max_num_seqs: int, masks: npt.NDArray[np.uint32] | None = None) -> None:
        """`masks` [rows, ⌈V / 32⌉]: those of the sequences that have a grammar, by the row of their matching."""
        self._masks = masks
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.zeros(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._choice_index = np.zeros(max_num_seqs, np.int32)

    def set(self, slot: int, record: GenerationRequest) -> None:
        """Fill the slot of a sequence that has just come."""
        sampling = record.sampling
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = record.seed
        self._choice_index[slot] = record.choice_index

    def batch(self, states: Sequence[SequenceState], output_positions: Sequence[int]) -> SamplingBatch:
        """One row per sequence, for the draw that follows `output_positions[r]` outputs."""
        slots = np.array([state.slot for state in states], np.intp)
        edits = [state.edits for state in states]
        edited = any(edit is not None for edit in edits)
        return SamplingBatch(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seed=self._seed[slots],
            choice_index=self._choice_index[slots],
            output_position=np.array(output_positions, np.int32),
            mask=self._mask(states),
            allowed=_csr([None if edit is None else edit.allowed for edit in edits]) if edited else None,
            banned=_csr([state.banned_tokens() for state in states]) if edited else None,
            bias=_bias(edits) if edited else None,
            penalties=_penalties(states) if edited else None,
        )

    def _mask(self, states: Sequence[SequenceState]) -> TokenMask | None:
        rows = [-1 if state.matching is None else state.matching.row for state in states]
        if self._masks is None or max(rows, default=-1) < 0:
            return None
        return TokenMask(np.array(rows, np.int32), self._masks)


def _row_starts(rows: Sequence[npt.NDArray[np.int32] | None]) -> npt.NDArray[np.int32]:
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([0 if row is None else len(row) for row in rows], out=starts[1:])
    return starts


def _csr(rows: Sequence[npt.NDArray[np.int32] | None]) -> Csr | None:
    """None when no row has an entry."""
    filled = [row for row in rows if row is not None and len(row)]
    return Csr(_row_starts(rows), np.concatenate(filled)) if filled else None


def _bias(edits: Sequence[LogitEdits | None]) -> CsrValues | None:
    filled = [edit.bias for edit in edits if edit is not None and len(edit.bias[0])]
    if not filled:
        return None
    return CsrValues(
        _row_starts([None if edit is None else edit.bias[0] for edit in edits]),
        np.concatenate([token_ids for token_ids, _ in filled]),
        np.concatenate([values for _, values in filled]),
    )


def _penalties(states: Sequence[SequenceState]) -> Penalties | None:
    counts = [None if state.edits is None else state.edits.counts for state in states]
    filled = [count for count in counts if count is not None]
    if not filled:
        return None
    sampling = [state.record.sampling for state in states]
    return Penalties(
        row_starts=_row_starts([None if count is None else count.token_ids for count in counts]),
        token_ids=np.concatenate([count.token_ids for count in filled]),
        output_counts=np.concatenate([count.output_counts for count in filled]),
        repetition=np.array([params.repetition_penalty for params in sampling], np.float32),
        presence=np.array([params.presence_penalty for params in sampling], np.float32),
        frequency=np.array([params.frequency_penalty for params in sampling], np.float32),
    )


def token_logprobs(
    kernels: KernelSet, logits: Array, token_ids: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Per row of `logits` [R, V] its token's logprob and as many alternatives as asked; None for a row with a NaN."""
    result = kernels.logprobs(logits, np.array(token_ids, np.int32), max(tops))
    top_ids, top_values = result.top_token_ids.tolist(), np.maximum(result.top_logprobs, LOWEST_LOGPROB).tolist()
    values, ranks = result.logprob.tolist(), result.rank.tolist()
    reports: list[TokenLogprobs | None] = []
    for row, (token_id, top) in enumerate(zip(token_ids, tops, strict=True)):
        value = values[row]
        if value != value:  # NaN
            reports.append(None)
            continue
        alternatives = tuple(zip(top_ids[row][:top], top_values[row][:top], strict=True))
        reports.append(TokenLogprobs(token_id, max(value, LOWEST_LOGPROB), ranks[row], alternatives))
    return reports
