"""The narrow waist between policy and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.core.plan import KVCapacity, SchedulerOutput, SeqId, StepResult
from engine.core.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class Ticket:
    """A submitted step; redeemed once, in the order of submission."""

    step_id: int


class Executor(Protocol):
    """Runs steps. Not thread-safe: one caller."""

    def capacity(self) -> KVCapacity:
        """KV memory; constant over the executor's life."""

    def step_cost(self) -> StepCost | None:
        """What steps cost and may cost, measured; None: the budget in tokens alone bounds them."""
        return None

    def submit(self, output: SchedulerOutput, *, timed: bool = False) -> Ticket:
        """Start a step; may return before it has run. Steps run in order of submission. `timed`: also tell how long
        each operation took, where that can be told; the step may take longer then."""

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a submitted step. Raises only if the engine as a whole cannot go on; a failure of one
        sequence is an error in its SeqResult."""

    def forget(self, seq_ids: Sequence[SeqId]) -> None:
        """Drop the state of sequences that no later step names (unknown ids are ignored)."""

    def close(self) -> None:
        """Release everything; no call may follow."""
