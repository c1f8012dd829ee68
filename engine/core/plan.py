"""What a step runs and what came of it: the data between scheduler and executor.

What there is one of per sequence and step is a NamedTuple: it is made in a third of the time of a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.types import GenerationRequest, TokenLogprobs

PENDING_TOKEN = -1  # stands for the token that the previous, still running step is sampling


class SeqId(NamedTuple):
    """One choice of one request: what the engine schedules."""

    request_id: int
    choice_index: int


class BlockTableTail(NamedTuple):
    """Entries `start`, `start + 1`, … of a block table become `block_ids`; entries before stay as they were.

    For a sequence whose record travels in this step `start` is 0 and the table is complete. In a window group the
    entries that no later token can see become the null block 0: they are part of what changed.
    """

    start: int
    block_ids: tuple[int, ...]


class BlockCopy(NamedTuple):
    """Copy all layers of a block before the step runs. Within one kind of copies of a step the targets are distinct,
    and all reads happen before any write."""

    group: int
    source: int
    target: int


class ScheduledSeq(NamedTuple):
    """One sequence's share of a step.

    Runs the tokens at positions start_position … start_position + num_scheduled_tokens − 1; `token_ids` are
    those tokens (PENDING_TOKEN only as the last one). After the step, KV exists for all of them.

    Prompt logprobs are wanted exactly when the record asks for them and rows of prompt tokens are: the row of position
    p tells about the prompt token at p + 1, and a row of position 0 also makes position 0 known, which is None.
    A resumed sequence asks only for those it hasn't reported yet.
    """

    seq_id: SeqId
    start_position: int
    token_ids: tuple[int, ...]
    block_tables: tuple[BlockTableTail, ...]  # what changed, one per KV group
    num_logits_rows: int  # logits of the last so many tokens are needed: 0 none, 1 last, len(token_ids) all
    sample: bool  # draw a token from the last row
    output_position: int  # how many outputs precede the token drawn: its position in the noise
    record: GenerationRequest | None = None  # travels once: when the sequence is new or resumed (choice_index, n = 1)

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. An executor forgets, swaps out, swaps in, copies blocks, and then runs the sequences in this order.

    `forget` names sequences of which no step is under way, and makes room before new records come: an executor never
    knows more than max_num_seqs sequences.

    Without sequences it carries nothing at all: it is no step, and need neither be submitted nor updated.
    """

    step_id: int
    seqs: tuple[ScheduledSeq, ...]
    block_copies: tuple[BlockCopy, ...] = ()  # copy-on-write, within the device
    forget: tuple[SeqId, ...] = ()  # sequences whose state the executor drops (ended or preempted)
    swap_out: tuple[BlockCopy, ...] = ()  # from the device's blocks to the host's
    swap_in: tuple[BlockCopy, ...] = ()  # from the host's blocks to the device's

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(len(seq.token_ids) for seq in self.seqs)


class SeqResult(NamedTuple):
    """What a step gave one sequence: 0..k tokens, or an error that ends this sequence alone.

    At least one token when it was to sample, unless `finished`; several only while no later step names the sequence,
    as is always so where the record has a constraint. After an error the results of steps that name the sequence and
    are under way already are dropped, whatever they are. An error in a step that computes a prompt for several choices
    ends all of them.
    """

    seq_id: SeqId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when the request asked
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # of the prompt positions this step made known
    embedding: tuple[float, ...] = ()
    error: str | None = None
    finished: bool = False  # the constraint is complete: nothing can follow these tokens


class TimedSpan(NamedTuple):
    """A named stretch of time, by time.monotonic()."""

    name: str
    begin: float
    end: float


class StepTimes(NamedTuple):
    """When the parts of a step ran, by time.monotonic()."""

    forward_begin: float
    forward_end: float
    sample_end: float  # sampling begins where the forward pass ends
    operations: tuple[TimedSpan, ...] = ()  # of the forward pass; in some of the steps that were to be timed


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of SchedulerOutput.seqs, one each."""

    step_id: int
    results: tuple[SeqResult, ...]
    expert_tokens_total: tuple[int, ...] = ()  # as in StepStats
    times: StepTimes | None = None


@dataclass(frozen=True, slots=True)
class KVGroupCapacity:
    """One KV group: layers that keep the same part of a sequence."""

    num_blocks: int  # including the null block 0, which is never handed out
    # Tokens a layer of this group can see back, itself included; None = all. A sequence in a window group holds the
    # blocks of the window and of the chunk that runs: num_blocks well above that keeps admission going.
    window: int | None = None
    num_host_blocks: int = 0  # in the host's memory, its own null block 0 included; 0 in all groups: there are none
    # What it costs to move one block to the host or back, in thousandths of the cost of computing one token.
    copy_cost: int = 0


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """The KV memory that the scheduler may give out."""

    block_size: int
    groups: tuple[KVGroupCapacity, ...]
