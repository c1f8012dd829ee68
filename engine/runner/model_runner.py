"""One step: plan → input arrays → model → tokens, logprobs, vectors."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.constraints.grammars import GrammarStore
from engine.constraints.matching import Constraints, Taken
from engine.core.plan import (
    PENDING_TOKEN,
    BlockCopy,
    ScheduledSeq,
    SchedulerOutput,
    SeqId,
    SeqResult,
    StepResult,
    StepTimes,
    TimedSpan,
)
from engine.models.decoder import Decoder
from engine.models.forward_batch import ForwardBatch
from engine.runner.head import OutputHead, PromptRow
from engine.runner.input_buffers import InputBuffers
from engine.runner.pooling import pool_chunk
from engine.runner.sampler import SamplingTable
from engine.runner.sequence_state import SequenceState
from engine.types import GenerationRequest, SamplingParams, TokenLogprobs
from kernels.interface import Array, KernelSet
from kernels.timing import OperationTime

BlockIds = npt.NDArray[np.int32]

_NO_TOKEN_ERROR = "no token can be drawn: the logits hold a NaN, or every token is masked"
_NO_WAY_ERROR = "the grammar and the request's own masks together leave no token"
_NAN_ERROR = "the model's output holds a NaN or an infinity"


@dataclass(frozen=True, slots=True)
class _Layout:
    """A step's tokens, and which of their rows the head reads: those to draw from, then those of prompt logprobs."""

    batch: ForwardBatch
    draws: list[int]  # plan indices of the sequences that sample
    prompt_rows: list[PromptRow]


class ModelRunner:
    """Holds what lives from step to step: sequences, their block tables, the buffers."""

    def __init__(
        self,
        kernels: KernelSet,
        decoder: Decoder,
        kv_caches: Sequence[Array],
        *,
        host_kv_caches: Sequence[Array] = (),
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        constraints: Constraints | None = None,
    ) -> None:
        """Without `constraints` a sequence that has one fails."""
        max_blocks = -(-max_model_len // block_size)
        self._kernels = kernels
        self._decoder = decoder
        self._kv_caches = tuple(kv_caches)
        self._host_kv_caches = tuple(host_kv_caches)  # per group; none: no plan swaps
        self._inputs = InputBuffers(kernels, kv_caches, block_size, max_num_batched_tokens, max_num_seqs, max_blocks)
        self._constraints = constraints or Constraints(GrammarStore(), decoder.config.vocab_size, max_num_seqs)
        self._table = SamplingTable(max_num_seqs, self._constraints.masks)
        self._head = OutputHead(kernels, decoder, self._table)
        self._states: dict[SeqId, SequenceState] = {}
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._expert_tokens = np.zeros(decoder.config.moe.num_experts if decoder.config.moe else 0, np.int64)

    def execute(self, output: SchedulerOutput, *, timed: bool = False) -> StepResult:
        """Run a step to its end. What fails for one sequence is an error in its result. `timed`: see Executor."""
        self.forget(output.forget)
        self._move_blocks(output.swap_out, self._kv_caches, self._host_kv_caches)
        self._move_blocks(output.swap_in, self._host_kv_caches, self._kv_caches)
        self._copy_blocks(output.block_copies)
        if not output.seqs:
            return StepResult(output.step_id, (), self._count_experts(0))
        states = [self._admit(seq) for seq in output.seqs]
        layout = self._lay_out(output.seqs, states)
        clock, operations = time.monotonic, list[OperationTime]() if timed else None
        begin = clock()
        hidden = self._decoder.forward(layout.batch, operations)
        forwarded = clock()
        results = tuple(self._read_out(output.seqs, states, layout, hidden))
        spans = [TimedSpan(name, begin + start, begin + end) for name, start, end in operations or ()]
        times = StepTimes(begin, forwarded, clock(), tuple(spans))
        return StepResult(output.step_id, results, self._count_experts(layout.batch.num_tokens), times)

    def warm_up(self, num_tokens: int = 1, context: int = 0) -> None:
        """Run tokens into the null block, as if `context` had been run before: libraries set themselves up now and not
        in somebody's first step."""
        zeros = [0] * num_tokens
        batch = self._inputs.fill(zeros, slots=[0], starts=[context], num_tokens=[num_tokens], logits_rows=[0])
        hidden = self._decoder.forward(batch)
        record = GenerationRequest(0, (0,), SamplingParams(max_tokens=1), seed=0)
        self._head.draw(hidden, batch.logits_rows, [SequenceState(record, 0)], [0])

    def forget(self, seq_ids: Sequence[SeqId]) -> None:
        """Drop sequences; unknown ids are ignored."""
        for seq_id in seq_ids:
            state = self._states.pop(seq_id, None)
            if state is not None:
                self._free_slots.append(state.slot)
                if state.matching is not None:
                    self._constraints.end(state.matching)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for group, sources, targets in _by_group(copies):
            self._kernels.copy_blocks(self._kv_caches[group], sources, targets)

    def _move_blocks(self, copies: Sequence[BlockCopy], source: Sequence[Array], target: Sequence[Array]) -> None:
        for group, source_ids, target_ids in _by_group(copies):
            self._kernels.move_blocks(source[group], source_ids, target[group], target_ids)

    def _admit(self, seq: ScheduledSeq) -> SequenceState:
        """The sequence's state, made from its record when that travels; its block tables brought up to date."""
        if seq.record is not None:
            self.forget((seq.seq_id,))
            state = SequenceState(seq.record, self._free_slots.pop())
            self._states[seq.seq_id] = state
            self._table.set(state.slot, seq.record)
            if seq.record.constraint is not None:
                state.matching = self._constraints.begin(seq.record, seq.record.constraint)
        else:
            state = self._states[seq.seq_id]
        self._inputs.update_tables(state.slot, seq.block_tables)
        return state

    def _lay_out(self, seqs: Sequence[ScheduledSeq], states: Sequence[SequenceState]) -> _Layout:
        token_ids: list[int] = []
        draws: list[int] = []
        draw_rows: list[int] = []
        prompt_rows: list[PromptRow] = []
        for index, (seq, state) in enumerate(zip(seqs, states, strict=True)):
            first_row = len(token_ids)
            token_ids += seq.token_ids
            if token_ids[-1] == PENDING_TOKEN:
                token_ids[-1] = max(0, state.last_token)  # a failed draw ends the sequence; until then any token does
            if seq.sample:
                draws.append(index)
                draw_rows.append(len(token_ids) - 1)
            if state.record.sampling.prompt_logprobs is not None:
                prompt_rows += _prompt_rows(index, first_row, seq, state)
        batch = self._inputs.fill(
            token_ids,
            slots=[state.slot for state in states],
            starts=[seq.start_position for seq in seqs],
            num_tokens=[len(seq.token_ids) for seq in seqs],
            logits_rows=draw_rows + [row.token_row for row in prompt_rows],
        )
        return _Layout(batch, draws, prompt_rows)

    def _read_out(
        self, seqs: Sequence[ScheduledSeq], states: Sequence[SequenceState], layout: _Layout, hidden: Array
    ) -> list[SeqResult]:
        rows, draws = layout.batch.logits_rows, layout.draws
        self._constraints.wait()
        tokens, reports = self._head.draw(
            hidden,
            rows[: len(draws)],
            [states[index] for index in draws],
            [seqs[index].output_position for index in draws],
        )
        drawn = dict(zip(draws, zip(tokens, reports, strict=True), strict=True))
        about_prompts: dict[int, list[TokenLogprobs | None]] = {}
        if layout.prompt_rows:
            prompt_reports = self._head.prompt_logprobs(hidden, rows[len(draws) :], layout.prompt_rows)
            for row, report in zip(layout.prompt_rows, prompt_reports, strict=True):
                about_prompts.setdefault(row.plan_index, []).append(report)
        vectors = self._pool(seqs, states, hidden)
        results = [
            self._result(seq, state, drawn.get(index), about_prompts.get(index, []), vectors.get(index, ()))
            for index, (seq, state) in enumerate(zip(seqs, states, strict=True))
        ]
        self._constraints.ask([matching for index in draws if (matching := states[index].matching) is not None])
        return results

    def _result(
        self,
        seq: ScheduledSeq,
        state: SequenceState,
        drawn: tuple[int, TokenLogprobs | None] | None,
        about_prompt: list[TokenLogprobs | None],
        vector: tuple[float, ...],
    ) -> SeqResult:
        """Put a sequence's share together; its state takes the drawn token."""
        if None in about_prompt or not all(map(math.isfinite, vector)):
            return SeqResult(seq.seq_id, error=_NAN_ERROR)
        token_ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        finished = False
        if drawn is not None:
            token_id, report = drawn
            token_ids, finished, error = self._take(state, token_id)
            if error is not None:
                return SeqResult(seq.seq_id, error=error)
            if report is not None:
                logprobs = (report,)
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        if state.record.sampling.prompt_logprobs is not None and seq.num_logits_rows:
            first_wanted = seq.start_position + len(seq.token_ids) - seq.num_logits_rows
            # nothing comes before the first token that could tell about it
            prompt_logprobs = (None, *about_prompt) if first_wanted == 0 else tuple(about_prompt)
        return SeqResult(seq.seq_id, token_ids, logprobs, prompt_logprobs, vector, finished=finished)

    def _take(self, state: SequenceState, token_id: int) -> Taken:
        """Give a sequence the token drawn for it, −1 if none could be, and those that its grammar forces then."""
        matching = state.matching
        if token_id >= 0:
            taken = Taken((token_id,)) if matching is None else matching.take(token_id)
            for output in taken.token_ids:
                state.add_output(output)
            return taken
        if matching is not None and matching.error is not None:
            return Taken(error=matching.error)
        if matching is not None and not state.may_draw(self._constraints.masks[matching.row]).any():
            # the grammar has nothing left but an end that must not be drawn, or the request's own masks forbid the rest
            return Taken(finished=True) if matching.accepting else Taken(error=_NO_WAY_ERROR)
        return Taken(error=_NO_TOKEN_ERROR)

    def _count_experts(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens that each expert has taken so far, this step's included; () for a model without experts."""
        counts = self._decoder.expert_counts(num_tokens)
        if counts is None:
            return ()
        self._expert_tokens += counts.sum(axis=0)
        return tuple(self._expert_tokens.tolist())

    def _pool(
        self, seqs: Sequence[ScheduledSeq], states: Sequence[SequenceState], hidden: Array
    ) -> dict[int, tuple[float, ...]]:
        """The vectors that this step completes, by plan index."""
        vectors: dict[int, tuple[float, ...]] = {}
        first_row = 0
        for index, (seq, state) in enumerate(zip(seqs, states, strict=True)):
            last_row = first_row + len(seq.token_ids)
            if state.record.pooling is not None:
                end_position = seq.start_position + len(seq.token_ids)
                vectors[index] = pool_chunk(self._kernels, state, hidden[first_row:last_row], end_position)
            first_row = last_row
        return vectors


def _by_group(copies: Sequence[BlockCopy]) -> Iterator[tuple[int, BlockIds, BlockIds]]:
    """(group, sources, targets), contiguous, for each group that has any."""
    for group in dict.fromkeys(copy.group for copy in copies):
        mine = [copy for copy in copies if copy.group == group]
        sources = np.array([copy.source for copy in mine], np.int32)
        targets = np.array([copy.target for copy in mine], np.int32)
        yield group, sources, targets


def _prompt_rows(index: int, first_row: int, seq: ScheduledSeq, state: SequenceState) -> list[PromptRow]:
    """The wanted rows that have a token of the prompt after them."""
    prompt, top = state.record.prompt_token_ids, state.record.sampling.prompt_logprobs or 0
    skipped = len(seq.token_ids) - seq.num_logits_rows
    first, end = seq.start_position + skipped, seq.start_position + len(seq.token_ids)
    return [
        PromptRow(index, first_row + skipped + offset, token_id, top)
        for offset, token_id in enumerate(prompt[first + 1 : end + 1])
    ]
