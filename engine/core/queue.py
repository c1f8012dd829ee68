"""Who is admitted next.

A policy decides the order of newly arrived sequences. What has run before (preempted) or belongs to a request that
runs (choices without a slot) comes first under every policy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from engine.core.request import Sequence


class QueuePolicy(Protocol):
    """The waiting sequences in order of admission. `step_id` counts steps: policies that age look at
    step_id − sequence.enqueued_step, never at a clock. Must be deterministic."""

    def push(self, sequence: Sequence) -> None:
        """A sequence has arrived."""

    def push_front(self, sequence: Sequence) -> None:
        """Before all others."""

    def pop(self, step_id: int) -> Sequence:
        """Take the next one out. Raises KeyError if there is none."""

    def unpop(self, sequence: Sequence) -> None:
        """Undo a pop, in the reverse order of several."""

    def remove(self, sequence: Sequence) -> None:
        """Take a certain one out. Raises KeyError if it isn't there."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of pop()."""


class FCFSQueue:
    """First come, first served."""

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

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())
