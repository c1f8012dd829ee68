"""Who waits, who runs, who is leaving: the life of sequences and when their blocks come and go.

add ─▶ WAITING ──admit──▶ RUNNING ──end──▶ ENDED
          ▲                  │ preempt        blocks released at once, or, while a step that writes them is
          └──── LEAVING ◀────┘                under way, when that step has been updated
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from engine.core.block_tables import BlockTables
from engine.core.host_tier import HostTier
from engine.core.kv_manager import KVManager
from engine.core.plan import SeqId
from engine.core.prefix_cache import PrefixMatch
from engine.core.queue import QueuePolicy
from engine.core.request import Sequence, Status
from engine.errors import EngineError


@dataclass(slots=True)
class Counters:
    """Totals since the start, as in StepStats."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    parked: int = 0
    overrun_tokens: int = 0


class Roster:
    """All sequences that are live or still hold blocks. `step_id` is advanced by the scheduler."""

    def __init__(self, kv: KVManager, host: HostTier | None, queue: QueuePolicy) -> None:
        self.kv = kv
        self.host = host
        self.queue = queue
        # By standing, then by admission; choices stand behind the one they parted from.
        self.running: list[Sequence] = []
        self.departing: list[Sequence] = []  # no longer running, but in a step under way: they hold their blocks
        self.live: dict[int, dict[int, Sequence]] = {}  # request id → choice index → sequence that hasn't ended
        self.counters = Counters()
        self.step_id = 0
        self._forget: list[SeqId] = []

    @property
    def num_resident(self) -> int:
        """Sequences that an executor may know: those that run, and those whose last step is still under way."""
        return len(self.running) + len(self.departing)

    def enlist(self, seq: Sequence, *, front: bool = False) -> None:
        """A new sequence waits; `front` if it belongs to a request that has run."""
        self.live.setdefault(seq.seq_id.request_id, {})[seq.seq_id.choice_index] = seq
        if front:
            self.queue.push_front(seq)
        else:
            self.queue.push(seq)

    def match(self, seq: Sequence) -> PrefixMatch:
        """What the device has of a waiting sequence."""
        return self.kv.match(seq.request.cache_namespace, seq.token_ids, seq.max_cached_tokens())

    def num_cached_blocks(self, seq: Sequence, match: PrefixMatch) -> int:
        """How many of its first blocks it need not compute, wherever they are."""
        if self.host is None:
            return match.num_blocks
        if seq.parked is not None:
            return seq.parked.num_tokens // self.kv.block_size
        namespace, max_tokens = seq.request.cache_namespace, seq.max_cached_tokens()
        return max(match.num_blocks, self.host.num_cached_blocks(namespace, seq.token_ids, max_tokens))

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        """A sequence taken out of the queue runs, starting behind its cached prefix, or where it was parked."""
        seq.tables = self.kv.admit(seq.request.cache_namespace, match)
        seq.num_computed_tokens = match.num_blocks * self.kv.block_size
        if self.host is not None:
            parked, seq.parked = seq.parked, None
            max_tokens = seq.max_cached_tokens()
            seq.num_computed_tokens = self.host.bring_back(seq.tables, seq.token_ids, max_tokens, parked)
        seq.status = Status.RUNNING
        insort(self.running, seq, key=lambda other: other.standing)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            if self.kv.cache.enabled and seq.max_cached_tokens() > 0:
                self.counters.prefix_query_tokens += seq.num_tokens
                self.counters.prefix_hit_tokens += seq.num_computed_tokens

    def fork(self, parent: Sequence, max_resident: int) -> None:
        """Let the choices of a running sequence go their own ways, from all but its last prompt token.

        As many as there is room for run at once, sharing its blocks; the others wait at the head of the queue.
        """
        place = self.running.index(parent) + 1
        waiting = []
        for choice_index in parent.forkable_choices:
            child = parent.part(choice_index, self.step_id)
            if parent.num_computed_tokens > 0:  # the parent's steps have reported the prompt, or are about to
                child.num_prompt_logprobs = child.num_prompt_tokens
                parent.children.append(child)
            if self.num_resident < max_resident:
                self.live[child.seq_id.request_id][choice_index] = child
                child.tables = self.kv.fork(self.tables_of(parent))
                child.num_computed_tokens = parent.num_computed_tokens
                child.status = Status.RUNNING
                self.running.insert(place, child)
                place += 1
            else:
                waiting.append(child)
        parent.stop_forking()
        for child in reversed(waiting):
            self.enlist(child, front=True)

    def part_without(self, parent: Sequence) -> None:
        """Let the choices that a sequence stands for go their own ways, because it alone is going to end."""
        choices = [parent.part(choice_index, self.step_id) for choice_index in parent.forkable_choices]
        parent.stop_forking()
        for child in reversed(choices):
            self.enlist(child, front=True)

    def preempt_last(self) -> None:
        """The last of the running goes back to the head of the queue, at once or when its steps are through."""
        seq = self.running[-1]
        self.counters.preemptions += 1
        seq.status = Status.LEAVING
        self._stop_running(seq)

    def end(self, seq: Sequence) -> None:
        """A live sequence is over. Its terminal update is the caller's affair."""
        was, seq.status = seq.status, Status.ENDED
        choices = self.live[seq.seq_id.request_id]
        del choices[seq.seq_id.choice_index]
        if not choices:
            del self.live[seq.seq_id.request_id]
        if was is Status.WAITING:
            self.queue.remove(seq)
            if self.host is not None and seq.parked is not None:
                self.host.drop(seq.parked, seq.token_ids)
                seq.parked = None
        elif was is Status.RUNNING:
            self._stop_running(seq)

    def _stop_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        if seq.num_in_flight:
            self.departing.append(seq)
        else:
            self._let_go(seq)

    def settle(self, seq: Sequence) -> None:
        """A step that names the sequence has been updated: if it was the last, what departs is gone."""
        if self.departing and seq.num_in_flight == 0 and seq in self.departing:
            self.departing.remove(seq)
            self._let_go(seq)

    def _let_go(self, seq: Sequence) -> None:
        tables = self.tables_of(seq)
        if seq.status is Status.LEAVING:
            self._park(seq, tables)
        self.kv.release(tables, seq.token_ids)
        seq.tables = None
        if seq.sent:
            self._forget.append(seq.seq_id)
        if seq.status is Status.LEAVING:
            seq.restart(self.step_id)
            self.queue.push_front(seq)

    def _park(self, seq: Sequence, tables: BlockTables) -> None:
        """Keep what a preempted sequence has computed in the host's memory, where that is worth it."""
        if self.host is not None and seq.can_be_parked:
            seq.parked = self.host.park(tables, seq.token_ids, seq.num_computed_tokens)
        if seq.parked is None:
            self.counters.preempted_tokens += seq.num_computed_tokens
        else:
            self.counters.parked += 1

    def take_forget(self) -> tuple[SeqId, ...]:
        """Sequences whose state the executor can drop, since the last call."""
        forget = tuple(self._forget)
        self._forget.clear()
        return forget

    @staticmethod
    def tables_of(seq: Sequence) -> BlockTables:
        """The tables of a sequence that holds blocks."""
        if seq.tables is None:
            raise EngineError(f"sequence {seq.seq_id} has no blocks")
        return seq.tables
