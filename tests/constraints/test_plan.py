"""What the scheduler plans for constrained sequences: no look-ahead, and a chunk where several tokens came at once."""

from __future__ import annotations

import pytest

from engine.core.plan import PENDING_TOKEN, SchedulerOutput, SeqId, SeqResult, StepResult
from engine.core.scheduler import Scheduler
from engine.types import FinishReason, RequestUpdate
from tests.choices import request
from tests.core.driver import capacity


def plan(output: SchedulerOutput) -> list[tuple[int, int, tuple[int, ...], bool, int]]:
    """(request id, start, tokens, sample, output position) of each sequence."""
    return [(s.seq_id[0], s.start_position, s.token_ids, s.sample, s.output_position) for s in output.seqs]


def results(output: SchedulerOutput, tokens: dict[int, tuple[int, ...]], finished: tuple[int, ...] = ()) -> StepResult:
    return StepResult(
        output.step_id,
        tuple(
            SeqResult(seq.seq_id, tokens.get(seq.seq_id[0], ()), finished=seq.seq_id[0] in finished)
            for seq in output.seqs
        ),
    )


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(capacity(32, 4), max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64)


def test_no_step_is_planned_on_top_of_the_token_being_sampled(scheduler: Scheduler) -> None:
    scheduler.add(request(1, (1, 2, 3), 10, constraint="a grammar"))
    scheduler.add(request(2, (4, 5), 10))
    first = scheduler.schedule()
    assert plan(first) == [(1, 0, (1, 2, 3), True, 0), (2, 0, (4, 5), True, 0)]
    second = scheduler.schedule()
    assert plan(second) == [(2, 2, (PENDING_TOKEN,), True, 1)]
    scheduler.update(first, results(first, {1: (7, 8, 9), 2: (6,)}))
    third = scheduler.schedule()
    assert plan(third) == [(2, 3, (PENDING_TOKEN,), True, 2), (1, 3, (7, 8, 9), True, 3)]
    scheduler.update(second, results(second, {2: (6,)}))
    updates = scheduler.update(third, results(third, {1: (10,), 2: (6,)}))
    assert [update.new_token_ids for update in updates] == [(6,), (10,)]
    scheduler.check_invariants()


def test_what_was_forced_is_computed_as_the_budget_allows(scheduler: Scheduler) -> None:
    """Eight tokens a step, of which a decode of another takes one; a draw follows the last chunk alone."""
    scheduler.add(request(1, (1, 2, 3), 40, constraint="a grammar"))
    scheduler.add(request(2, (4, 5), 10))
    output = scheduler.schedule()
    forced = tuple(range(20, 35))
    scheduler.update(output, results(output, {1: forced, 2: (6,)}))
    plans = []
    for _ in range(4):
        output = scheduler.schedule()
        plans.append([(who, start, len(tokens), sample, at) for who, start, tokens, sample, at in plan(output)])
        scheduler.update(output, results(output, {seq.seq_id[0]: (50,) for seq in output.seqs if seq.sample}))
        scheduler.check_invariants()
    assert plans == [
        [(2, 2, 1, True, 1), (1, 3, 7, False, 0)],
        [(2, 3, 1, True, 2), (1, 10, 7, False, 0)],
        [(1, 17, 1, True, 15), (2, 4, 1, True, 3)],  # it lacks one token: a decode like any other
        [(1, 18, 1, True, 16), (2, 5, 1, True, 4)],
    ]


def end(updates: list[RequestUpdate]) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
    [update] = updates
    return update.new_token_ids, update.finish_reason, update.stop_token_id


@pytest.mark.parametrize(
    ("tokens", "finished", "expected"),
    [
        ((7, 8), True, ((7, 8), FinishReason.STOP, None)),
        ((), True, ((), FinishReason.STOP, None)),
        ((7, 8, 9), True, ((7, 8, 9), FinishReason.STOP, None)),  # max_tokens, but complete
        ((7, 8, 9, 10), True, ((7, 8, 9), FinishReason.LENGTH, None)),
        ((7, 42, 8), False, ((7, 42), FinishReason.STOP, 42)),
        ((7, 42), True, ((7, 42), FinishReason.STOP, 42)),
        ((7, 8, 9), False, ((7, 8, 9), FinishReason.LENGTH, None)),
    ],
)
def test_how_it_ends(
    scheduler: Scheduler,
    tokens: tuple[int, ...],
    finished: bool,
    expected: tuple[tuple[int, ...], FinishReason, int | None],
) -> None:
    scheduler.add(request(1, (1, 2, 3), 3, stop=(42,), constraint="a grammar"))
    output = scheduler.schedule()
    assert end(scheduler.update(output, results(output, {1: tokens}, (1,) if finished else ()))) == expected
    assert not scheduler.is_live(1)
    scheduler.check_invariants()


def test_no_token_without_an_end_is_an_error(scheduler: Scheduler) -> None:
    scheduler.add(request(1, (1, 2, 3), 3, constraint="a grammar"))
    output = scheduler.schedule()
    [update] = scheduler.update(output, StepResult(output.step_id, (SeqResult(SeqId(1, 0)),)))
    assert update.finish_reason is FinishReason.ERROR
