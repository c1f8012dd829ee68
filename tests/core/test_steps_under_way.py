"""A step is planned while the one before still runs."""

from __future__ import annotations

import pytest

from engine.core.plan import PENDING_TOKEN, SeqId
from engine.types import FinishReason, KVGroupStats
from tests.choices import request
from tests.core.driver import capacity, draw, histories, make_driver


def test_the_token_being_sampled_is_planned_as_pending() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 20, 4))
    first, second, third = driver.submit(), driver.submit(), driver.submit()
    assert [(s.seqs[0].start_position, s.seqs[0].token_ids) for s in (second, third)] == [
        (20, (PENDING_TOKEN,)),
        (21, (PENDING_TOKEN,)),
    ]
    assert [s.seqs[0].output_position for s in (first, second, third)] == [0, 1, 2]
    driver.collect()
    driver.collect()
    driver.collect()
    [token] = driver.submit().seqs[0].token_ids
    assert token == driver.outcomes[SeqId(1, 0)].token_ids[-1]


def test_the_length_is_known_beforehand_so_nothing_is_overrun() -> None:
    driver = make_driver(capacity(100), depth=2)
    driver.add(request(1, 20, 3))
    assert [plan for plan in driver.run() if plan] == [[(1, 20)], [(1, 1)], [(1, 1)]]
    assert driver.scheduler.stats().overrun_tokens_total == 0


def test_the_step_behind_a_stop_is_dropped_and_counted() -> None:
    one = request(1, 20, 9)
    stop = draw(one, histories(0, one.prompt_token_ids)[-1], 0, 1000)
    driver = make_driver(capacity(100), depth=2)
    driver.add(request(1, 20, 9, stop=(stop,)))
    driver.run()
    outcome = driver.outcomes[SeqId(1, 0)]
    assert (outcome.token_ids, outcome.finish_reason) == ([stop], FinishReason.STOP)
    assert driver.scheduler.stats().overrun_tokens_total == 1


def test_blocks_of_an_ended_sequence_are_released_after_the_last_step_that_may_write_them() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 20, 9))
    driver.submit()
    driver.submit()
    [update] = driver.abort(1)
    assert update.finish_reason is FinishReason.ABORT
    assert driver.scheduler.stats().kv_groups == (KVGroupStats(free=98, private=2, shared=0, cached=0),)
    assert driver.collect() == []
    assert driver.scheduler.stats().kv_groups == (KVGroupStats(free=98, private=2, shared=0, cached=0),)
    assert driver.collect() == []
    assert driver.scheduler.stats().kv_groups == (KVGroupStats(free=100, private=0, shared=0, cached=0),)
    assert driver.scheduler.stats().overrun_tokens_total == 2


def test_an_ended_sequence_is_forgotten_only_when_no_step_names_it() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 20, 9), request(2, 20, 9))
    driver.submit()
    driver.submit()
    driver.abort(1)
    assert driver.submit().forget == ()
    driver.collect()
    driver.collect()
    assert driver.submit().forget == (SeqId(1, 0),)


def test_an_id_may_come_again_while_its_last_step_is_under_way() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 20, 9))
    driver.submit()
    driver.abort(1)
    driver.add(request(1, 30, 1))
    assert driver.outcomes[SeqId(1, 0)].finish_reason is None
    assert driver.collect() == []  # of the old one
    driver.run()
    assert len(driver.outcomes[SeqId(1, 0)].token_ids) == 1


def test_nothing_to_plan_while_all_hangs_on_a_step_under_way() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 20, 1))
    driver.submit()
    output = driver.submit()
    assert output.seqs == ()
    assert driver.scheduler.update(output, driver.executor.run(output)) == []
    assert driver.scheduler.has_work()
    [update] = driver.collect()
    assert update.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_chunks_of_a_prompt_may_be_under_way_together(depth: int) -> None:
    driver = make_driver(capacity(100), budget=16, depth=depth)
    driver.add(request(1, 40, 2))
    assert [plan for plan in driver.run() if plan] == [[(1, 16)], [(1, 16)], [(1, 8)], [(1, 1)]]


def test_choices_may_part_while_their_prompt_is_under_way() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 20, 3, n=2))
    driver.submit()
    output = driver.submit()
    assert [(s.seq_id.choice_index, s.start_position) for s in output.seqs] == [(0, 19), (1, 19)]
    assert len(output.block_copies) == 1
    driver.collect()
    driver.collect()
    assert all(len(o.token_ids) == 1 for o in driver.outcomes.values())


def test_a_choice_that_parted_has_no_share_in_what_the_other_computes_again() -> None:
    """Choice 0 parts from choice 1 while their prompt is under way, finds no block, and is preempted: what it runs
    then it runs for itself alone."""
    driver = make_driver(capacity(9, block_size=4), budget=2, prefix_cache=False)
    driver.add(request(1, 2, 30))
    driver.submit()
    driver.collect()
    driver.add(request(2, 17, 1, n=2))
    for _ in range(15):
        driver.submit()
        driver.collect()
    assert driver.plans[-1] == [(1, 1), (2, 1)]
    driver.submit()
    assert driver.submit().seqs[-1].seq_id == SeqId(1, 0)  # both choices of the other have given way
    driver.executor.failing[SeqId(2, 0)] = "scripted"
    driver.run()
    assert driver.outcomes[SeqId(2, 0)].error == "scripted"
    assert driver.outcomes[SeqId(2, 1)].finish_reason is FinishReason.LENGTH
