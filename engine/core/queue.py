"""Who is admitted next.

A policy decides the order of newly arrived sequences. What has run before (preempted) or belongs to a request that
runs (choices without a slot) comes first under every policy, among those of its own priority under `priority`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from engine.core.request import Sequence

CachedTokens = Callable[[Sequence], int]  # how many of a waiting sequence's tokens the prefix cache has now


class QueuePolicy(Protocol):
    """The waiting sequences. `step_id` counts steps: policies that age look at step_id − sequence.enqueued_step, never
    at a clock. Must be deterministic."""

    preempts: bool  # whether a waiting sequence may take the place of a running one of lower precedence

    def push(self, sequence: Sequence) -> None:
        """A sequence has arrived."""

    def push_front(self, sequence: Sequence) -> None:
        """It has run before, or belongs to a request that runs: before all others of its precedence."""

    def pop(self, step_id: int) -> Sequence:
        """Take the next one out. Raises IndexError or KeyError if there is none."""

    def unpop(self, sequence: Sequence) -> None:
        """Undo a pop, in the reverse order of several."""

    def remove(self, sequence: Sequence) -> None:
        """Take a certain one out. Raises KeyError if it isn't there."""

    def served(self, sequence: Sequence, num_tokens: int) -> None:
        """A running sequence has produced tokens."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """The one first that has waited longest since it came to this queue; under FCFS in the order of pop()."""


QueueFactory = Callable[[CachedTokens], QueuePolicy]  # makes an empty queue, owned by the scheduler from then on


class FCFSQueue:
    """First come, first served."""

    preempts = False

    def __init__(self) -> None:
        self._sequences: OrderedDict[tuple[int, int], Sequence] = OrderedDict()  # by seq_id

    def push(self, sequence: Sequence) -> None:
        self._sequences[sequence.seq_id] = sequence

    def push_front(self, sequence: Sequence) -> None:
        self._sequences[sequence.seq_id] = sequence
        self._sequences.move_to_end(sequence.seq_id, last=False)

    def pop(self, step_id: int) -> Sequence:
        return self._sequences.popitem(last=False)[1]

    def unpop(self, sequence: Sequence) -> None:
        self.push_front(sequence)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.seq_id]

    def served(self, sequence: Sequence, num_tokens: int) -> None:
        """Means nothing here."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())


def fcfs(cached_tokens: CachedTokens) -> QueuePolicy:
    """A QueueFactory."""
    return FCFSQueue()
