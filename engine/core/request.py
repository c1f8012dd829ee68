"""A sequence: one choice of one request, and how far it has come."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from engine.core.block_tables import BlockTables
from engine.core.host_tier import Parked
from engine.core.plan import PENDING_TOKEN, SeqId
from engine.types import FinishReason, GenerationRequest, Pooling

_NEVER = -1


class Status(Enum):
    """Where a sequence is; ENDED is for good."""

    WAITING = "waiting"  # in the queue, without blocks
    RUNNING = "running"  # has blocks; each step may give it tokens to run
    LEAVING = "leaving"  # preempted, but a step that writes its blocks is still under way
    ENDED = "ended"  # its terminal update is out


class Sequence:
    """State of a choice. Written by the scheduler alone.

        token_ids │ prompt ............ │ outputs so far .... │ num_pending (being sampled)
                  │ num_computed_tokens ──▶ catches up with num_tokens

    `num_computed_tokens` advances when a step is planned, `token_ids` when its result is in.
    A request with n choices is one sequence until the others have been forked off it.
    """

    __slots__ = (
        "arrival",
        "awaited",
        "awaited_blocks",
        "children",
        "enqueued_step",
        "fork_at",
        "forkable_choices",
        "is_constrained",
        "max_num_tokens",
        "num_awaited_steps",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_pending",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "overdue",
        "parked",
        "precedence",
        "rank",
        "request",
        "run_limit",
        "sampling",
        "sent",
        "seq_id",
        "status",
        "stop_token_ids",
        "tables",
        "token_ids",
    )

    def __init__(self, request: GenerationRequest, max_model_len: int, step_id: int) -> None:
        self.request = request if request.n == 1 else replace(request, n=1)
        self.seq_id = SeqId(request.request_id, request.choice_index)
        self.sampling = request.sampling
        self.stop_token_ids = request.stop_token_ids
        # A step may give it several tokens, so none is planned on top of one that is being sampled.
        self.is_constrained = request.constraint is not None
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_pending = 0  # tokens that steps under way are sampling
        self.num_computed_tokens = 0
        # At this length it ends.
        self.max_num_tokens = min(self.num_prompt_tokens + request.sampling.max_tokens, max_model_len)
        # Tokens it ever runs: the last one sampled is never computed.
        self.run_limit = max(self.num_prompt_tokens, self.max_num_tokens - 1)
        self.status = Status.WAITING
        self.enqueued_step = step_id
        # The queue policy's own: what it sorts by, and whether the sequence has waited so long that it goes first.
        self.arrival = 0
        self.rank = 0
        self.overdue = False
        # Of two running sequences the one with the higher value is preempted first; the queue policy sets it.
        self.precedence = 0
        self.tables: BlockTables | None = None  # while it runs or leaves
        self.parked: Parked | None = None  # in the host's memory, while it waits
        self.num_in_flight = 0  # planned steps that name it and have not been updated
        self.sent = False  # the executor has its record
        self.num_cached_tokens: int | None = None  # prefix hit at first admission
        # Positions reported so far; a record with outputs has had them all.
        self.num_prompt_logprobs = self.num_prompt_tokens if request.output_token_ids else 0
        # Choices that will be forked off when all but the last prompt token is computed. With max_tokens 0 there is
        # nothing to fork for: they end together with this one.
        self.forkable_choices = list(range(request.choice_index + 1, request.choice_index + request.n))
        self.fork_at = self.num_prompt_tokens - 1 if request.n > 1 and self.samples else _NEVER
        # Choices forked off while the steps that compute their shared prompt are still under way.
        self.children: list[Sequence] = []
        # The running sequence that is computing this one's prefix, and how many blocks of it are worth waiting for.
        self.awaited: Sequence | None = None
        self.awaited_blocks = 0
        self.num_awaited_steps = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def samples(self) -> bool:
        """Whether it draws tokens at all (max_tokens > 0)."""
        return self.sampling.max_tokens > 0

    @property
    def must_fork(self) -> bool:
        """Whether it has come to the point where its choices part."""
        return self.num_computed_tokens == self.fork_at

    @property
    def num_choices(self) -> int:
        """Live choices that this sequence stands for."""
        return 1 + len(self.forkable_choices)

    @property
    def standing(self) -> tuple[bool, int]:
        """Running sequences are kept in this order: the last is preempted first."""
        return not self.overdue, self.precedence

    def num_runnable_tokens(self) -> int:
        """Tokens that the next step may compute."""
        end = min(len(self.token_ids) + (0 if self.is_constrained else self.num_pending), self.run_limit)
        if self.fork_at != _NEVER:
            end = self.fork_at
        return end - self.num_computed_tokens

    def lacks_one_token(self) -> bool:
        """Whether it is a decode: all is computed but the token sampled last."""
        num_computed = self.num_computed_tokens
        return (
            self.num_prompt_tokens <= num_computed < self.run_limit
            and len(self.token_ids) + self.num_pending == num_computed + 1
            and not (self.is_constrained and self.num_pending)
        )

    def max_cached_tokens(self) -> int:
        """How long a cached prefix may be, so that a token is left to run and all wanted rows are computed."""
        if self.request.pooling is Pooling.MEAN:
            return 0
        if self.wants_prompt_logprobs():
            return max(0, self.num_prompt_logprobs - 1)
        return len(self.token_ids) - 1

    @property
    def can_be_parked(self) -> bool:
        """Whether it could go on from its KV alone; a mean over hidden states is lost when it leaves the executor."""
        return self.request.pooling is not Pooling.MEAN

    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of prompt positions are still to be reported."""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens

    def num_logits_rows(self, start: int, end: int, sample: bool) -> int:
        """Rows wanted of a chunk: the one before each prompt position to report, and the last one to sample."""
        if self.wants_prompt_logprobs():
            return end - max(start, self.num_prompt_logprobs - 1)
        return int(sample)

    def chunk(self, start: int, end: int) -> tuple[int, ...]:
        """The tokens to run; the one being sampled is PENDING_TOKEN."""
        known = tuple(self.token_ids[start:end])
        return known if end <= len(self.token_ids) else (*known, PENDING_TOKEN)

    def record(self) -> GenerationRequest:
        """What the executor needs to know: the request with the outputs so far."""
        outputs = tuple(self.token_ids[self.num_prompt_tokens :])
        if outputs == self.request.output_token_ids:
            return self.request
        return replace(self.request, output_token_ids=outputs)

    def accept(self, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Append sampled tokens up to the one that ends the sequence; returns how many, and the reason if it ends."""
        for count, token_id in enumerate(token_ids, 1):
            self.token_ids.append(token_id)
            if token_id in self.stop_token_ids and self.num_output_tokens > self.sampling.min_tokens:
                return count, FinishReason.STOP
            if len(self.token_ids) >= self.max_num_tokens:
                return count, FinishReason.LENGTH
        return len(token_ids), None

    def stop_forking(self) -> None:
        """From here on it stands for itself alone."""
        self.forkable_choices = []
        self.fork_at = _NEVER

    def part(self, choice_index: int, step_id: int) -> Sequence:
        """A choice that goes its own way from here, waiting, without blocks."""
        child = Sequence(replace(self.request, choice_index=choice_index), self.max_num_tokens, step_id)
        child.num_cached_tokens = self.num_cached_tokens
        child.num_prompt_logprobs = self.num_prompt_logprobs
        child.precedence = self.precedence
        child.overdue = self.overdue
        return child

    def restart(self, step_id: int) -> None:
        """Back to waiting: everything is computed anew from the prompt and the outputs so far."""
        self.status = Status.WAITING
        self.enqueued_step = step_id
        self.tables = None
        self.num_computed_tokens = 0
        self.num_pending = 0
        self.sent = False
        self.children = []
        self.awaited = None
        self.num_awaited_steps = 0
