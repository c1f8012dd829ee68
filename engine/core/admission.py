"""Whom of the waiting a step takes in.

Admission rule (the watermark): beside running sequences, a waiting one is admitted if in every KV group the blocks
that can be had cover all its tokens, what running sequences lack for the tokens they have, and one block for each of
all these to grow into. With nothing running it is admitted as it is: Scheduler.add() has made sure that it can run
alone. A head of the queue that does not fit is not passed by; only who waits for a prefix is.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.prefix_cache import PrefixMatch
from engine.core.prefix_wait import keeps_waiting, starts_waiting
from engine.core.request import Sequence
from engine.core.roster import Roster


class StepPlan:
    """A step in the making."""

    __slots__ = ("budget", "chunks", "cost_left", "decodes", "short_of_blocks")

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens not given away yet, nor set aside for decodes
        self.cost_left = 0  # where steps have a StepCost: what chunks may still cost
        self.decodes: list[Sequence] = []
        self.chunks: list[tuple[Sequence, int]] = []
        self.short_of_blocks = False  # somebody went without: nobody is admitted


class Admission:
    """Moves sequences from the queue to the running. `plan_chunk` gives a newcomer its share of the step; choices that
    part from it then stand behind it among the running."""

    def __init__(
        self,
        roster: Roster,
        plan_chunk: Callable[[StepPlan, Sequence], None],
        *,
        max_resident: int,
        is_static: bool,
        max_prefix_wait_steps: int,
    ) -> None:
        self._roster = roster
        self._kv = roster.kv
        self._plan_chunk = plan_chunk
        self._max_resident = max_resident
        self._is_static = is_static
        self._max_prefix_wait_steps = max_prefix_wait_steps

    def plan_waiting(self, plan: StepPlan) -> None:
        """Admit as many as the rule, the places and the budget allow."""
        roster, queue = self._roster, self._roster.queue
        if not len(queue) or (self._is_static and roster.running):
            return
        under_way = self._sequences_computing_prompts()
        promised = self._promised_blocks()
        passed_over: list[Sequence] = []
        while len(queue) and self._may_admit(plan):
            seq = queue.pop(roster.step_id)
            passed_over.append(seq)
            if keeps_waiting(seq, self._max_prefix_wait_steps):
                continue
            match = roster.match(seq)
            num_cached = roster.num_cached_blocks(seq, match)
            if starts_waiting(seq, num_cached, under_way, self._kv.block_size, self._max_prefix_wait_steps):
                continue
            if not self._fits(seq, match, promised):
                break
            passed_over.pop()
            num_running = len(roster.running)
            roster.admit(seq, match)
            if self._kv.cache.enabled:
                under_way.append(seq)
            place = roster.running.index(seq)
            while num_running < len(roster.running):  # itself, and the choices that part from it at once
                newcomer = roster.running[place]
                self._plan_chunk(plan, newcomer)
                promised = [blocks + self._missing(newcomer, group) for group, blocks in enumerate(promised)]
                place += 1
                num_running += 1
        for seq in reversed(passed_over):
            queue.unpop(seq)

    def give_way_to_precedence(self) -> None:
        """Preempt the last of the running while it stands behind the head of the queue, which lacks place or blocks."""
        roster, queue = self._roster, self._roster.queue
        while len(queue) and roster.running and not roster.departing:
            head = queue.pop(roster.step_id)
            queue.unpop(head)
            if head.overdue or head.standing >= roster.running[-1].standing or head.awaited is not None:
                return
            has_place = roster.num_resident < self._max_resident
            if has_place and self._fits(head, roster.match(head), self._promised_blocks()):
                return
            roster.preempt_last()

    def _may_admit(self, plan: StepPlan) -> bool:
        """Whether there is room for one more, and tokens for it; a static batch is put together whatever the budget."""
        has_place = self._roster.num_resident < self._max_resident
        return has_place and not plan.short_of_blocks and (plan.budget > 0 or self._is_static)

    def _fits(self, seq: Sequence, match: PrefixMatch, promised: list[int]) -> bool:
        """The admission rule."""
        num_running = len(self._roster.running)
        growth = min(num_running + seq.num_choices, self._max_resident)
        return not num_running or self._kv.fits(match, seq.num_tokens, [blocks + growth for blocks in promised])

    def _promised_blocks(self) -> list[int]:
        """Per group, the blocks that running sequences lack for the tokens they have."""
        groups = range(len(self._kv.pools))
        return [sum([self._missing(seq, group) for seq in self._roster.running]) for group in groups]

    def _missing(self, seq: Sequence, group: int) -> int:
        tables = seq.tables
        return 0 if tables is None else self._kv.missing_blocks(group, tables.num_blocks, seq.num_tokens)

    def _sequences_computing_prompts(self) -> list[Sequence]:
        """Running sequences whose prompt isn't all in the cache yet: others may wait for it."""
        if not self._kv.cache.enabled:
            return []
        block_size = self._kv.block_size
        return [
            seq
            for seq in self._roster.running
            if self._roster.tables_of(seq).num_committed_blocks < seq.num_prompt_tokens // block_size
        ]
