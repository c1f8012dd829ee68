"""Which request runs how many tokens in the next step.

There is no prefill phase and no decode phase: every sequence has `num_computed_tokens`, which must catch up with its
`num_tokens`, and each step hands out one token budget, always in this order:

1. running sequences that lack one token (decodes) get one each;
2. running sequences whose prompt is partly computed get the rest of it, as far as the budget goes;
3. waiting sequences, in the order of the queue policy, are admitted with as much of their prompt as is left
   (admission.py).

Blocks are handed out in the order of the running list: by precedence, and then by admission. So the first of it always
gets what it needs: if blocks are short a chunk shrinks to what fits, and if not even one token fits the last is
preempted: it gives up its blocks, goes to the head of the queue, and later comes back from the host's memory, if it was
parked there, or is computed anew through the prefix cache.

n choices are one sequence until all but the last prompt token is computed; then they part, sharing its blocks, and
each runs the last prompt token itself, so that each draws with its own noise.

Steps under way: schedule() may be called again before the update() of the step before. A token that is being sampled
then is planned as PENDING_TOKEN. What a sequence writes is released only when no step that names it is under way.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

from engine.core.admission import Admission, StepPlan
from engine.core.host_tier import HostTier, PreemptionMode
from engine.core.invariants import check
from engine.core.kv_manager import KVManager
from engine.core.outcome import absorb, terminal_updates
from engine.core.plan import KVCapacity, ScheduledSeq, SchedulerOutput, StepResult
from engine.core.queue import QueueFactory, fcfs
from engine.core.request import Sequence, Status
from engine.core.roster import Roster
from engine.core.step_cost import StepCost
from engine.errors import ConfigError, EngineError, RequestRejected
from engine.types import CacheBranch, FinishReason, GenerationRequest, RequestUpdate, StepStats

DEFAULT_MAX_PREFIX_WAIT_STEPS = 64


class StepUnderWay(NamedTuple):
    """A step between schedule() and update()."""

    step_id: int
    sequences: tuple[Sequence, ...]  # in the order of SchedulerOutput.seqs


class Scheduler:
    """Pure and deterministic: the same calls give the same plans. Not thread-safe.

    Each choice that add() accepts ends in exactly one terminal update, returned by update() or abort().
    """

    def __init__(
        self,
        capacity: KVCapacity,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        queue: QueueFactory = fcfs,
        preemption: PreemptionMode = "auto",
        prefix_cache: bool = True,
        batching: Literal["continuous", "static"] = "continuous",
        max_prefix_wait_steps: int = DEFAULT_MAX_PREFIX_WAIT_STEPS,
        step_cost: StepCost | None = None,
    ) -> None:
        """`queue` makes the queue of the waiting; `preemption` says what becomes of what the preempted have computed,
        where the capacity has host blocks ("auto": whatever costs less).

        At most min(max_num_seqs, max_num_batched_tokens) sequences run, so that each can get its token in every step;
        an executor knows no more than that at any time, from a sequence's record to the output that forgets it.
        Static batching, the baseline of benchmarks, admits only when nothing runs. A request waits for a prefix that
        another one is computing in at most max_prefix_wait_steps steps. `step_cost` bounds chunks of prompts beside the
        budget in tokens. Raises ConfigError on sizes below 1.
        """
        if min(max_num_batched_tokens, max_num_seqs, max_model_len, capacity.block_size) < 1:
            raise ConfigError("max_num_batched_tokens, max_num_seqs, max_model_len and block_size must be at least 1")
        self.kv = KVManager(capacity, prefix_cache=prefix_cache, max_step_tokens=max_num_batched_tokens)
        self.host = _host_tier(self.kv, capacity, prefix_cache, preemption)
        self.roster = Roster(self.kv, self.host, queue(self._num_cached_tokens))
        self.steps_under_way: deque[StepUnderWay] = deque()
        self._max_num_batched_tokens = max_num_batched_tokens
        self._step_cost = step_cost
        self._max_resident = min(max_num_seqs, max_num_batched_tokens)
        self._max_model_len = max_model_len
        self._admission = Admission(
            self.roster,
            lambda plan, newcomer: self._plan_chunk(plan, newcomer, may_preempt=False),
            max_resident=self._max_resident,
            is_static=batching == "static",
            max_prefix_wait_steps=max_prefix_wait_steps,
        )
        self._num_decode_tokens = 0  # of the last step planned
        self._num_prefill_tokens = 0

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: GenerationRequest) -> None:
        """Take a request. Raises RequestRejected, and takes nothing, if it can never run here."""
        self._check_request(request)
        self.roster.enlist(Sequence(request, self._max_model_len, self.roster.step_id))

    def _check_request(self, request: GenerationRequest) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        num_tokens = num_prompt_tokens + len(request.output_token_ids)
        max_tokens = request.sampling.max_tokens
        if num_prompt_tokens == 0:
            raise RequestRejected("the prompt is empty")
        if num_prompt_tokens + min(max_tokens, 1) > self._max_model_len:
            raise RequestRejected(
                f"the prompt has {num_prompt_tokens} tokens and leaves no room for output: "
                f"the context holds {self._max_model_len}"
            )
        max_num_tokens = min(num_prompt_tokens + max_tokens, self._max_model_len)
        if request.output_token_ids and num_tokens >= max_num_tokens:
            raise RequestRejected(f"there is nothing left to generate after {num_tokens} tokens")
        reason = self.kv.why_never_fits(max(num_prompt_tokens, max_num_tokens - 1))
        if reason is not None:
            raise RequestRejected(
                f"{num_prompt_tokens} prompt tokens and {max_tokens} output tokens never fit: {reason}"
            )
        for seq in self.roster.live.get(request.request_id, {}).values():
            first = seq.seq_id.choice_index
            taken = {first, *seq.forkable_choices}
            if not taken.isdisjoint(range(request.choice_index, request.choice_index + request.n)):
                raise RequestRejected(f"request {request.request_id} is already here")

    def abort(self, request_id: int, choice_index: int | None = None) -> list[RequestUpdate]:
        """End one choice or all of a request; returns their terminal updates, after which there will be no others.

        Choices that have ended or never were here are passed over. Blocks that a step under way may still write are
        released by its update().
        """
        updates: list[RequestUpdate] = []
        for seq in list(self.roster.live.get(request_id, {}).values()):
            news = terminal_updates(seq, FinishReason.ABORT)
            if choice_index is None:
                updates += news
                self.roster.end(seq)
            elif choice_index in seq.forkable_choices:
                updates += [update for update in news if update.choice_index == choice_index]
                seq.forkable_choices.remove(choice_index)
            elif choice_index == seq.seq_id.choice_index:
                updates.append(news[0])
                self.roster.part_without(seq)
                self.roster.end(seq)
        return updates

    def has_work(self) -> bool:
        """Whether a choice is live. If so and no step is under way, schedule() gives it or others something to run."""
        return bool(self.roster.live)

    def is_live(self, request_id: int) -> bool:
        """Whether a choice of the request is live."""
        return request_id in self.roster.live

    # --- planning ----------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step.

        An output without sequences (nothing is live, or all that is live hangs on steps under way) is no step: it
        carries nothing else either and can be dropped.
        """
        self.roster.step_id += 1
        plan = StepPlan(self._max_num_batched_tokens)
        if self.roster.queue.preempts:
            self._admission.give_way_to_precedence()
        self._plan_running(plan)
        self._admission.plan_waiting(plan)
        self._num_decode_tokens = len(plan.decodes)
        self._num_prefill_tokens = sum([num_tokens for _, num_tokens in plan.chunks])
        step_id = self.roster.step_id
        seqs = [self._commission(seq, 1) for seq in plan.decodes]
        seqs += [self._commission(seq, num_tokens) for seq, num_tokens in plan.chunks]
        if not seqs:
            return SchedulerOutput(step_id, ())
        sequences = (*plan.decodes, *[seq for seq, _ in plan.chunks])
        self.steps_under_way.append(StepUnderWay(step_id, sequences))
        swap_out, swap_in = ((), ()) if self.host is None else self.host.take_swaps()
        copies, forget = self.kv.take_copies(), self.roster.take_forget()
        return SchedulerOutput(step_id, tuple(seqs), copies, forget, swap_out, swap_in)

    def _plan_running(self, plan: StepPlan) -> None:
        running = self.roster.running
        plan.budget -= sum([seq.lacks_one_token() for seq in running])
        if self._step_cost is not None:
            lengths = [seq.num_tokens for seq in running if seq.lacks_one_token()]
            plan.cost_left = self._step_cost.for_chunks(lengths)
        index = 0
        while index < len(running):  # forks lengthen the list, preemptions shorten it from behind
            seq = running[index]
            if not seq.lacks_one_token():
                self._plan_chunk(plan, seq, may_preempt=True)
            elif self._make_room(plan, seq, 1):
                plan.decodes.append(seq)
            index += 1

    def _plan_chunk(self, plan: StepPlan, seq: Sequence, *, may_preempt: bool) -> None:
        if seq.must_fork:
            self.roster.fork(seq, self._max_resident)
        num_tokens = min(seq.num_runnable_tokens(), plan.budget)
        if self._step_cost is not None and num_tokens > 0:
            num_tokens = self._affordable(self._step_cost, plan, seq.num_computed_tokens, num_tokens)
        if num_tokens > 0:
            num_tokens = self._make_room(plan, seq, num_tokens, may_preempt=may_preempt)
            if num_tokens:
                if self._step_cost is not None:
                    plan.cost_left -= self._step_cost.of_chunk(seq.num_computed_tokens, num_tokens)
                plan.chunks.append((seq, num_tokens))
                plan.budget -= num_tokens

    def _affordable(self, cost: StepCost, plan: StepPlan, start: int, num_tokens: int) -> int:
        """How many of a sequence's next tokens the step still has the time for; the first chunk gets one at least."""
        fitting = max(cost.fitting(start, plan.cost_left), 0 if plan.chunks else 1)
        if fitting < num_tokens:
            plan.budget = fitting  # nothing goes beside it
        return min(fitting, num_tokens)

    def _make_room(self, plan: StepPlan, seq: Sequence, num_tokens: int, *, may_preempt: bool = True) -> int:
        """Blocks for the sequence's next tokens; returns for how many, 0 if it has to sit this step out.

        Newcomers may not preempt: the last of the running may have its share of this step already.
        """
        running = self.roster.running
        while True:
            num_fitting = self.kv.grow(self.roster.tables_of(seq), seq.num_computed_tokens, num_tokens)
            if num_fitting:
                return num_fitting
            plan.short_of_blocks = True
            if self.roster.departing or not may_preempt:
                return 0  # their blocks will be there when the step under way has been updated
            if running[-1] is seq and len(running) == 1:
                if self.steps_under_way:
                    return 0  # its window moves on when they have been updated
                raise EngineError(f"sequence {seq.seq_id} doesn't fit although it runs alone")
            victim = running[-1]
            self.roster.preempt_last()
            if victim is seq:
                return 0

    def _num_cached_tokens(self, seq: Sequence) -> int:
        return self.roster.num_cached_blocks(seq, self.roster.match(seq)) * self.kv.block_size

    def _commission(self, seq: Sequence, num_tokens: int) -> ScheduledSeq:
        """Write down a sequence's share of the step and count its tokens as computed."""
        start = seq.num_computed_tokens
        end = start + num_tokens
        sample = end == seq.num_tokens and seq.samples
        record = None if seq.sent else seq.record()
        scheduled = ScheduledSeq(
            seq.seq_id,
            start,
            seq.chunk(start, end),
            self.kv.take_tails(self.roster.tables_of(seq)),
            seq.num_logits_rows(start, end, sample),
            sample,
            end - seq.num_prompt_tokens if sample else 0,
            record,
        )
        seq.sent = True
        seq.num_computed_tokens = end
        seq.num_in_flight += 1
        seq.num_pending += sample
        return scheduled

    # --- results -----------------------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, result: StepResult) -> list[RequestUpdate]:
        """Take in what came of a step; the news of its choices, each choice's in order.

        Steps are updated in the order in which they were planned; an output without sequences may be left out. Raises
        EngineError if the result isn't that of the oldest step under way.
        """
        if not output.seqs:
            return []
        if not self.steps_under_way or self.steps_under_way[0].step_id != output.step_id:
            raise EngineError(f"step {output.step_id} isn't the oldest step under way")
        if result.step_id != output.step_id or len(result.results) != len(output.seqs):
            raise EngineError(f"the result of step {result.step_id} doesn't belong to step {output.step_id}")
        step = self.steps_under_way.popleft()
        updates: list[RequestUpdate] = []
        for seq, planned, outcome in zip(step.sequences, output.seqs, result.results, strict=True):
            seq.num_in_flight -= 1
            absorb(self.roster, seq, planned, outcome, updates)
        return updates

    # --- state -------------------------------------------------------------------------------------------------------

    def stats(self) -> StepStats:
        """The state now; token counts are those of the last schedule(). Times are left at zero."""
        roster, counters = self.roster, self.roster.counters
        head = next(iter(roster.queue), None)
        leaving = sum([seq.status is Status.LEAVING for seq in roster.departing])
        return StepStats(
            step_id=roster.step_id,
            num_running=len(roster.running),
            num_waiting=len(roster.queue) + leaving,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            kv_groups=self.kv.stats(),
            num_wasted_slots=self._num_wasted_slots(),
            oldest_waiting_steps=0 if head is None else roster.step_id - head.enqueued_step,
            prefix_query_tokens_total=counters.prefix_query_tokens,
            prefix_hit_tokens_total=counters.prefix_hit_tokens,
            evicted_blocks_total=self.kv.cache.num_evicted_blocks,
            preemptions_total=counters.preemptions,
            preempted_tokens_total=counters.preempted_tokens,
            overrun_tokens_total=counters.overrun_tokens,
            num_swapped=0 if self.host is None else self.host.num_parked,
            kv_host_groups=() if self.host is None else self.host.stats(),
            parked_total=counters.parked,
            swapped_out_blocks_total=0 if self.host is None else self.host.num_blocks_out,
            swapped_in_blocks_total=0 if self.host is None else self.host.num_blocks_in,
        )

    def _num_wasted_slots(self) -> int:
        """Slots behind the last token of each block table; a block that forks still share counts once."""
        num_wasted = 0
        shared_tails: dict[tuple[int, int], None] = {}
        for seq in (*self.roster.running, *self.roster.departing):
            tables = self.roster.tables_of(seq)
            num_unused = tables.num_blocks * self.kv.block_size - seq.num_computed_tokens
            for group, ids in enumerate(tables.block_ids):
                if tables.forked and num_unused:
                    if (group, ids[-1]) in shared_tails:
                        continue
                    shared_tails[group, ids[-1]] = None
                num_wasted += num_unused
        return num_wasted

    def cache_branches(self, max_branches: int) -> tuple[CacheBranch, ...]:
        """The largest branches of the prefix cache's tree, parents before children. Takes time in proportion to it."""
        return self.kv.cache.largest_branches(max_branches)

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that nobody refers to."""
        self.kv.reset_prefix_cache()
        if self.host is not None:
            self.host.reset()

    def check_invariants(self) -> None:
        """Raises InvariantViolation if the books don't add up. Takes time in proportion to the number of blocks."""
        check(self.roster, [step.sequences for step in self.steps_under_way])


def _host_tier(kv: KVManager, capacity: KVCapacity, prefix_cache: bool, preemption: PreemptionMode) -> HostTier | None:
    if any(group.num_host_blocks == 0 for group in capacity.groups):
        return None
    return HostTier(kv, capacity, prefix_cache=prefix_cache, preemption=preemption)
