"""When blocks run out: who gives way, and that nobody notices in the tokens."""

from __future__ import annotations

import pytest

from engine.core.plan import PENDING_TOKEN, SeqId
from engine.types import FinishReason, KVGroupStats
from tests.choices import request
from tests.core.driver import Driver, capacity, expected_outputs, make_driver


def assert_all_as_alone(driver: Driver, *request_ids: int, prompt: int, max_tokens: int) -> None:
    for request_id in request_ids:
        tokens, reason = expected_outputs(request(request_id, prompt, max_tokens), 0, 8192, 1000)
        outcome = driver.outcomes[SeqId(request_id, 0)]
        assert (tuple(outcome.token_ids), outcome.finish_reason) == (tokens, reason)


def test_the_last_admitted_gives_way_and_is_computed_again_through_the_cache() -> None:
    driver = make_driver(capacity(6))
    driver.add(request(1, 32, 20), request(2, 20, 20))
    assert driver.step() == [(1, 32), (2, 20)]  # 2 + 2 blocks, one each to grow into
    for _ in range(16):
        assert driver.step() == [(1, 1), (2, 1)]
    # 1 has computed 48 tokens and needs a fourth block; 2 holds three for its 36 tokens
    output = driver.submit()
    assert [(s.seq_id.request_id, len(s.token_ids)) for s in output.seqs] == [(1, 1)]
    assert output.forget == (SeqId(2, 0),)
    stats = driver.scheduler.stats()
    assert (stats.preemptions_total, stats.preempted_tokens_total, stats.num_waiting) == (1, 36, 1)
    assert stats.kv_groups == (KVGroupStats(free=0, private=1, shared=3, cached=2),)
    driver.collect()
    assert [driver.step(), driver.step()] == [[(1, 1)], [(1, 1)]]
    resumed = driver.submit().seqs[0]  # 1 has ended
    assert (resumed.start_position, len(resumed.token_ids), resumed.output_position) == (32, 5, 17)
    assert resumed.record is not None
    assert resumed.record.output_token_ids == tuple(driver.outcomes[SeqId(2, 0)].token_ids)
    assert len(resumed.record.output_token_ids) == 17
    driver.run()
    assert driver.outcomes[SeqId(2, 0)].num_cached_tokens == 0  # the hit at first admission
    assert_all_as_alone(driver, 1, prompt=32, max_tokens=20)
    assert_all_as_alone(driver, 2, prompt=20, max_tokens=20)


def test_the_last_admitted_gives_way_to_itself() -> None:
    driver = make_driver(capacity(6))
    driver.add(request(1, 20, 25), request(2, 32, 25))
    plans = driver.run()
    # 2 needs a fourth block at token 48, when 1 holds three: it is the last itself
    assert plans[17] == [(1, 1)]
    assert driver.scheduler.stats().preemptions_total == 1
    assert_all_as_alone(driver, 1, prompt=20, max_tokens=25)


def test_a_step_under_way_keeps_the_blocks_of_the_preempted_until_it_is_updated() -> None:
    driver = make_driver(capacity(6))
    driver.add(request(1, 32, 20), request(2, 20, 20))
    driver.submit()
    for _ in range(16):
        driver.submit()
        driver.collect()
    # One step is under way: 2 is marked, 1 sits this step out, nothing is released yet.
    assert driver.submit().seqs == ()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.preemptions_total) == (1, 1, 1)
    assert stats.kv_groups[0].free == stats.kv_groups[0].cached == 0
    updates = driver.collect()  # both have sampled in it, and both are told
    assert [(u.request_id, len(u.new_token_ids)) for u in updates] == [(1, 1), (2, 1)]
    output = driver.submit()
    assert [(s.seq_id.request_id, s.token_ids[0] != PENDING_TOKEN) for s in output.seqs] == [(1, True)]
    assert output.forget == (SeqId(2, 0),)
    driver.depth = 2
    driver.run()
    assert_all_as_alone(driver, 1, prompt=32, max_tokens=20)
    assert_all_as_alone(driver, 2, prompt=20, max_tokens=20)


def test_while_one_is_leaving_nobody_else_has_to_go() -> None:
    driver = make_driver(capacity(8))
    driver.add(request(1, 32, 20), request(2, 20, 20), request(3, 4, 20))
    driver.submit()
    for _ in range(16):
        driver.submit()
        driver.collect()
    # 1 needs a block and sits this step out: 3 is about to bring two; 2 has room and runs
    assert [s.seq_id.request_id for s in driver.submit().seqs] == [2]
    assert driver.scheduler.stats().preemptions_total == 1
    driver.depth = 2
    driver.run()
    assert_all_as_alone(driver, 2, prompt=20, max_tokens=20)


def test_a_preempted_choice_can_be_aborted_while_it_leaves() -> None:
    driver = make_driver(capacity(6))
    driver.add(request(1, 32, 20), request(2, 20, 20))
    driver.submit()
    for _ in range(16):
        driver.submit()
        driver.collect()
    driver.submit()
    [update] = driver.abort(2)
    assert update.finish_reason is FinishReason.ABORT
    driver.run()
    assert_all_as_alone(driver, 1, prompt=32, max_tokens=20)


def test_the_preempted_goes_before_those_that_waited() -> None:
    driver = make_driver(capacity(6), max_num_seqs=2)
    driver.add(request(1, 32, 20), request(2, 20, 20), request(3, 4, 1))
    for _ in range(18):
        driver.step()
    assert [seq.seq_id.request_id for seq in driver.scheduler.roster.queue] == [2, 3]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_oldest_always_gets_on(depth: int, prefix_cache: bool) -> None:
    """Eight sequences that want 72 blocks have ten."""
    driver = make_driver(capacity(10), depth=depth, prefix_cache=prefix_cache)
    driver.add(*[request(k, 40, 100) for k in range(8)])
    plans = driver.run(max_steps=3_000)
    assert driver.scheduler.stats().preemptions_total == 4
    assert_all_as_alone(driver, *range(8), prompt=40, max_tokens=100)
    begun: list[int] = []
    for plan in plans:
        begun += [request_id for request_id, _ in plan if request_id not in begun]
    assert begun == list(range(8))


def test_nobody_is_admitted_in_a_step_in_which_somebody_went_without() -> None:
    driver = make_driver(capacity(6))
    driver.add(request(1, 32, 20), request(2, 20, 20))
    for _ in range(17):
        driver.step()
    driver.add(request(3, 4, 1))
    assert driver.step() == [(1, 1)]
    assert [seq.seq_id.request_id for seq in driver.scheduler.roster.queue] == [2, 3]
