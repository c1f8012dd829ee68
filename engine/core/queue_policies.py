"""Queue policies beside FCFS: by rank, or fair among tenants. All of them age.

The ageing rule is one for all: a sequence that has waited `max_wait_steps` steps is *overdue*, and overdue sequences
go first, the longest waiting before the others. So from then on nobody who came to the queue later is admitted before
it, whatever the policy thinks of it, and only the finitely many who came earlier are. An overdue sequence stays so: it
is not preempted for a higher priority either.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping

from engine.core.queue import CachedTokens, QueueFactory, fcfs
from engine.core.request import Sequence

MEASURED_WAITERS = 64  # those that have waited longest are ranked anew in each step

_FIRST = -(1 << 63)  # the rank of what comes before all others

Entry = tuple[
    int, int, Sequence
]  # (what it is sorted by, number of arrival, …): numbers differ, so no more is compared


class _Arrivals:
    """Numbers the sequences as they come, and knows which has waited longest."""

    def __init__(self, max_wait_steps: int) -> None:
        self._max_wait_steps = max_wait_steps
        self._by_age: list[Entry] = []  # sorted by enqueued_step
        self._last_number = 0

    def number(self, sequence: Sequence, *, front: bool) -> None:
        """Positive numbers count up; those of sequences that come first are negative and count down."""
        self._last_number += 1
        sequence.arrival = -self._last_number if front else self._last_number

    def add(self, sequence: Sequence) -> None:
        insort(self._by_age, _age_entry(sequence))

    def discard(self, sequence: Sequence) -> None:
        _take_out(self._by_age, _age_entry(sequence))

    def overdue(self, step_id: int) -> Sequence | None:
        """The longest waiting sequence if it is overdue; it is marked as such."""
        if not self._by_age or step_id - self._by_age[0][0] < self._max_wait_steps:
            return None
        sequence = self._by_age[0][2]
        sequence.overdue = True
        return sequence

    def oldest(self, count: int) -> list[Sequence]:
        return [sequence for _, _, sequence in self._by_age[:count]]

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._by_age)


def _age_entry(sequence: Sequence) -> Entry:
    return sequence.enqueued_step, sequence.arrival, sequence


def _take_out(entries: list[Entry], entry: Entry) -> None:
    index = bisect_left(entries, entry[:2], key=lambda other: other[:2])
    if index == len(entries) or entries[index][:2] != entry[:2]:
        raise KeyError(f"sequence {entry[2].seq_id} isn't waiting")
    del entries[index]


class RankedQueue:
    """The lowest rank first, ties in the order of arrival.

    `rank` is asked when a sequence arrives and, if `rerank`, once a step for the MEASURED_WAITERS longest waiting.
    """

    preempts = False

    def __init__(self, rank: Callable[[Sequence], int], max_wait_steps: int, *, rerank: bool = False) -> None:
        self._rank = rank
        self._reranks = rerank
        self._arrivals = _Arrivals(max_wait_steps)
        self._by_rank: list[Entry] = []
        self._ranked_step = 0

    def push(self, sequence: Sequence) -> None:
        sequence.rank = self._rank(sequence)
        self._arrivals.number(sequence, front=False)
        self.unpop(sequence)

    def push_front(self, sequence: Sequence) -> None:
        sequence.rank = _FIRST
        self._arrivals.number(sequence, front=True)
        self.unpop(sequence)

    def pop(self, step_id: int) -> Sequence:
        if self._reranks and step_id != self._ranked_step:
            self._ranked_step = step_id
            self._rerank()
        sequence = self._arrivals.overdue(step_id) or self._by_rank[0][2]
        self.remove(sequence)
        return sequence

    def unpop(self, sequence: Sequence) -> None:
        self._arrivals.add(sequence)
        insort(self._by_rank, (sequence.rank, sequence.arrival, sequence))

    def remove(self, sequence: Sequence) -> None:
        self._arrivals.discard(sequence)
        _take_out(self._by_rank, (sequence.rank, sequence.arrival, sequence))

    def served(self, sequence: Sequence, num_tokens: int) -> None:
        """Means nothing here."""

    def _rerank(self) -> None:
        for sequence in self._arrivals.oldest(MEASURED_WAITERS):
            if sequence.arrival < 0:
                continue
            rank = self._rank(sequence)
            if rank != sequence.rank:
                _take_out(self._by_rank, (sequence.rank, sequence.arrival, sequence))
                sequence.rank = rank
                insort(self._by_rank, (sequence.rank, sequence.arrival, sequence))

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._arrivals)


class PriorityQueue(RankedQueue):
    """The lowest priority value first. It may take the place of running sequences with higher values."""

    preempts = True

    def __init__(self, max_wait_steps: int) -> None:
        super().__init__(lambda sequence: sequence.precedence, max_wait_steps)

    def push(self, sequence: Sequence) -> None:
        sequence.precedence = sequence.request.priority
        super().push(sequence)

    def push_front(self, sequence: Sequence) -> None:
        sequence.rank = _FIRST if sequence.overdue else sequence.precedence
        self._arrivals.number(sequence, front=True)
        self.unpop(sequence)


class FairQueue:
    """The tenant that has been served the fewest tokens first; its sequences in the order of arrival.

    The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a tenant pays
    for a prompt when it is admitted and for each output token when it comes. One that had nothing waiting starts
    where the others are: being away earns no credit.
    """

    preempts = False

    def __init__(self, max_wait_steps: int) -> None:
        self._arrivals = _Arrivals(max_wait_steps)
        self._first: list[Entry] = []  # those that have run before
        self._by_tenant: dict[int, list[Entry]] = {}  # tenants with something waiting; sorted by number
        self._counters: dict[int, int] = {}  # tokens paid for, by tenant
        self._level = 0  # the least counter of a waiting tenant at the last pop

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        if tenant not in self._by_tenant:
            self._counters[tenant] = max(self._counters.get(tenant, 0), self._level)
        self._arrivals.number(sequence, front=False)
        self._add(sequence)

    def push_front(self, sequence: Sequence) -> None:
        self._arrivals.number(sequence, front=True)
        self._add(sequence)

    def pop(self, step_id: int) -> Sequence:
        sequence = self._arrivals.overdue(step_id) or self._next()
        self.remove(sequence)
        if sequence.arrival > 0:
            self._counters[sequence.request.tenant] += sequence.num_prompt_tokens
        return sequence

    def unpop(self, sequence: Sequence) -> None:
        if sequence.arrival > 0:
            self._counters[sequence.request.tenant] -= sequence.num_prompt_tokens
        self._add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._arrivals.discard(sequence)
        if sequence.arrival < 0:
            _take_out(self._first, (0, sequence.arrival, sequence))
            return
        tenant = sequence.request.tenant
        _take_out(self._by_tenant[tenant], (0, sequence.arrival, sequence))
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def served(self, sequence: Sequence, num_tokens: int) -> None:
        tenant = sequence.request.tenant
        self._counters[tenant] = self._counters.get(tenant, self._level) + num_tokens

    def _add(self, sequence: Sequence) -> None:
        self._arrivals.add(sequence)
        tenant = sequence.request.tenant
        entries = self._first if sequence.arrival < 0 else self._by_tenant.setdefault(tenant, [])
        insort(entries, (0, sequence.arrival, sequence))

    def _next(self) -> Sequence:
        if self._first:
            return self._first[0][2]
        counters = self._counters
        tenant = min(self._by_tenant, key=lambda tenant: (counters[tenant], self._by_tenant[tenant][0][1]))
        self._level = max(self._level, counters[tenant])
        return self._by_tenant[tenant][0][2]

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._arrivals)


def queue_factories(max_wait_steps: int) -> Mapping[str, QueueFactory]:
    """What builds each policy's queue, by the policy's name."""

    def shortest_first(cached_tokens: CachedTokens) -> RankedQueue:
        def tokens_to_run(sequence: Sequence) -> int:
            to_generate = sequence.num_choices * (sequence.max_num_tokens - sequence.num_tokens)
            return sequence.num_tokens - cached_tokens(sequence) + to_generate

        return RankedQueue(tokens_to_run, max_wait_steps, rerank=True)

    def longest_match_first(cached_tokens: CachedTokens) -> RankedQueue:
        return RankedQueue(lambda sequence: -cached_tokens(sequence), max_wait_steps, rerank=True)

    return {
        "fcfs": fcfs,
        "sjf": shortest_first,
        "priority": lambda cached_tokens: PriorityQueue(max_wait_steps),
        "fair": lambda cached_tokens: FairQueue(max_wait_steps),
        "lpm": longest_match_first,
    }
