"""Exactly who runs how many tokens in each step."""

from __future__ import annotations

import pytest

from engine.core.plan import BlockTableTail, KVCapacity, KVGroupCapacity, ScheduledSeq, SeqId, StepResult
from engine.errors import ConfigError, EngineError, RequestRejected
from engine.types import FinishReason, KVGroupStats
from tests.choices import request
from tests.core.driver import capacity, make_driver

# --- the token budget ------------------------------------------------------------------------------------------------


def test_three_prompts_of_800_tokens_under_a_budget_of_1024() -> None:
    driver = make_driver(capacity(1000), budget=1024)
    driver.add(request(1, 800, 3), request(2, 800, 3), request(3, 800, 3))
    assert driver.run() == [
        [(1, 800), (2, 224)],
        [(1, 1), (2, 576), (3, 447)],
        [(1, 1), (2, 1), (3, 353)],
        [(2, 1), (3, 1)],
        [(3, 1)],
    ]


def test_decodes_come_first_and_a_partial_prompt_takes_the_rest_of_the_budget() -> None:
    driver = make_driver(capacity(1000), budget=64)
    driver.add(request(1, 20, 6), request(2, 20, 6))
    assert driver.step() == [(1, 20), (2, 20)]
    driver.add(request(3, 150, 2))
    assert [driver.step() for _ in range(4)] == [
        [(1, 1), (2, 1), (3, 62)],
        [(1, 1), (2, 1), (3, 62)],
        [(1, 1), (2, 1), (3, 26)],
        [(1, 1), (2, 1), (3, 1)],
    ]


def test_a_prompt_begun_earlier_goes_before_new_ones() -> None:
    driver = make_driver(capacity(1000), budget=10)
    driver.add(request(1, 15, 1), request(2, 4, 1), request(3, 4, 1))
    assert driver.run() == [[(1, 10)], [(1, 5), (2, 4), (3, 1)], [(3, 3)]]


def test_a_budget_of_one_token() -> None:
    driver = make_driver(capacity(1000), budget=1)
    driver.add(request(1, 3, 2), request(2, 2, 1))
    assert driver.run() == [[(1, 1)]] * 4 + [[(2, 1)]] * 2


def test_no_more_sequences_run_than_the_budget_can_serve_in_each_step() -> None:
    driver = make_driver(capacity(1000), budget=2, max_num_seqs=64)
    driver.add(*[request(k, 1, 3) for k in range(1, 5)])
    assert driver.run() == [[(1, 1), (2, 1)]] * 3 + [[(3, 1), (4, 1)]] * 3


def test_max_num_seqs_bounds_the_batch() -> None:
    driver = make_driver(capacity(1000), max_num_seqs=2)
    driver.add(request(1, 5, 1), request(2, 5, 2), request(3, 5, 1))
    assert driver.run() == [[(1, 5), (2, 5)], [(2, 1), (3, 5)]]


# --- blocks ----------------------------------------------------------------------------------------------------------


def test_a_prompt_of_exactly_two_blocks_takes_the_third_with_its_first_output() -> None:
    driver = make_driver(capacity(10))
    driver.add(request(1, 32, 3))
    tails = []
    for _ in range(3):
        output = driver.submit()
        tails.append(output.seqs[0].block_tables)
        driver.collect()
    assert tails == [(BlockTableTail(0, (1, 2)),), (BlockTableTail(2, (3,)),), (BlockTableTail(3, ()),)]


def test_a_prompt_that_fills_the_pool_runs() -> None:
    driver = make_driver(capacity(4))
    driver.add(request(1, 64, 1), request(2, 16, 1))
    assert driver.run() == [[(1, 64)], [(2, 16)]]
    assert driver.scheduler.stats().kv_groups == (KVGroupStats(free=0, private=0, shared=0, cached=4),)


def test_what_never_fits_is_refused_with_the_numbers_and_those_behind_are_served() -> None:
    driver = make_driver(capacity(4))
    with pytest.raises(RequestRejected) as refusal:
        driver.add(request(1, 64, 2))
    assert str(refusal.value) == (
        "64 prompt tokens and 2 output tokens never fit: "
        "65 tokens need 5 blocks of 16 tokens in KV group 0, which has 4"
    )
    driver.add(request(2, 50, 2))
    assert driver.run() == [[(2, 50)], [(2, 1)]]


def test_the_last_output_needs_no_block() -> None:
    driver = make_driver(capacity(4))
    driver.add(request(1, 60, 5))  # 64 tokens are computed, the 65th is only told
    assert driver.run() == [[(1, 60)], *[[(1, 1)]] * 4]
    assert len(driver.outcomes[SeqId(1, 0)].token_ids) == 5


def test_admission_leaves_a_block_for_each_running_sequence_to_grow_into() -> None:
    # 1 holds two blocks; 2 needs two, and one more for each of the two: 2 + 2 + 2 = 6
    driver = make_driver(capacity(6))
    driver.add(request(1, 32, 10), request(2, 32, 10))
    assert driver.step() == [(1, 32), (2, 32)]
    tight = make_driver(capacity(5))
    tight.add(request(1, 32, 10), request(2, 32, 10))
    assert tight.step() == [(1, 32)]


def test_admission_counts_the_blocks_that_partial_prompts_still_need() -> None:
    # 1 needs 10 blocks and has 2 after its first chunk; 2 needs 1; one each to grow into: 10 + 1 + 2 = 13
    for num_blocks, together in ((13, True), (12, False)):
        driver = make_driver(capacity(num_blocks), budget=32, batching="static")
        driver.add(request(1, 160, 2), request(2, 10, 2))
        assert driver.step() == [(1, 32)]
        assert driver.scheduler.stats().num_running == 1 + together


def test_a_head_that_does_not_fit_is_not_passed_by() -> None:
    driver = make_driver(capacity(8))
    driver.add(request(1, 64, 3), request(2, 100, 1), request(3, 4, 1))
    assert driver.run() == [[(1, 64)], [(1, 1)], [(1, 1)], [(2, 100)], [(3, 4)]]


# --- prefix cache ----------------------------------------------------------------------------------------------------


def test_a_second_prompt_runs_only_what_is_not_cached() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(100), 1))
    driver.run()
    driver.add(request(2, [*range(70), 7, 7, 7], 1))
    assert driver.run() == [[(2, 9)]]  # four blocks, 64 tokens, are cached
    assert driver.outcomes[SeqId(2, 0)].num_cached_tokens == 64
    stats = driver.scheduler.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (173, 64)


def test_a_prompt_that_is_cached_to_the_end_runs_its_last_block_again() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(64), 1))
    driver.run()
    driver.add(request(2, range(64), 1))
    assert driver.run() == [[(2, 16)]]


def test_outputs_are_cached_too() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(30), 20))
    driver.run()
    conversation = [*range(30), *driver.outcomes[SeqId(1, 0)].token_ids]
    driver.add(request(2, [*conversation, 1, 2, 3], 1))
    assert driver.run() == [[(2, 5)]]  # 49 tokens were computed: three blocks


def test_without_the_prefix_cache_all_is_computed_again() -> None:
    driver = make_driver(capacity(100), prefix_cache=False)
    driver.add(request(1, range(64), 1), request(2, range(64), 1))
    assert driver.run() == [[(1, 64), (2, 64)]]
    assert driver.scheduler.stats().kv_groups == (KVGroupStats(free=100, private=0, shared=0, cached=0),)
    assert driver.scheduler.stats().prefix_query_tokens_total == 0


def test_namespaces_do_not_share() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(64), 1, namespace=1))
    driver.run()
    driver.add(request(2, range(64), 1, namespace=2))
    assert driver.run() == [[(2, 64)]]


def test_a_reset_forgets_what_is_cached() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(64), 1))
    driver.run()
    driver.scheduler.reset_prefix_cache()
    driver.add(request(2, range(64), 1))
    assert driver.run() == [[(2, 64)]]


# --- static batching -------------------------------------------------------------------------------------------------


def test_static_batching_admits_only_when_nothing_runs() -> None:
    driver = make_driver(capacity(100), max_num_seqs=2, batching="static")
    driver.add(request(1, 10, 1), request(2, 10, 3), request(3, 10, 1))
    assert driver.run() == [[(1, 10), (2, 10)], [(2, 1)], [(2, 1)], [(3, 10)]]


def test_a_static_batch_is_put_together_whatever_the_budget() -> None:
    driver = make_driver(capacity(100), budget=16, max_num_seqs=3, batching="static")
    driver.add(*[request(k, 10, 2) for k in range(1, 5)])
    assert driver.run() == [
        [(1, 10), (2, 6)],
        [(1, 1), (2, 4), (3, 10)],
        [(2, 1), (3, 1)],
        [(4, 10)],
        [(4, 1)],
    ]


# --- what a plan says ------------------------------------------------------------------------------------------------


def test_the_record_travels_with_the_first_step_alone() -> None:
    driver = make_driver(capacity(100), budget=20)
    one = request(1, 30, 2)
    driver.add(one)
    first = driver.submit().seqs[0]
    driver.collect()
    prompt = one.prompt_token_ids
    assert first == ScheduledSeq(SeqId(1, 0), 0, prompt[:20], (BlockTableTail(0, (1, 2)),), 0, False, 0, one)
    second = driver.submit().seqs[0]
    driver.collect()
    assert second == ScheduledSeq(SeqId(1, 0), 20, prompt[20:], (BlockTableTail(2, ()),), 1, True, 0, None)
    [token_id] = driver.outcomes[SeqId(1, 0)].token_ids
    third = driver.submit().seqs[0]
    assert third == ScheduledSeq(SeqId(1, 0), 30, (token_id,), (BlockTableTail(2, ()),), 1, True, 1, None)


def test_an_ended_sequence_is_forgotten_with_the_next_step() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 5, 1), request(2, 5, 2))
    driver.step()
    assert driver.submit().forget == (SeqId(1, 0),)


def test_nothing_to_do_is_an_output_without_sequences() -> None:
    driver = make_driver(capacity(100))
    assert driver.submit().seqs == ()
    assert not driver.scheduler.has_work()


def test_stats_of_a_busy_scheduler() -> None:
    driver = make_driver(capacity(100), budget=30, max_num_seqs=2)
    driver.add(request(1, 20, 5), request(2, 40, 5), request(3, 10, 5))
    for _ in range(3):
        driver.step()
    stats = driver.scheduler.stats()
    assert (stats.step_id, stats.num_running, stats.num_waiting) == (3, 2, 1)
    assert (stats.num_decode_tokens, stats.num_prefill_tokens) == (1, 1)
    # 1 has computed 22 tokens in two blocks, 2 has computed 40 in three, two of them in the tree
    assert stats.num_wasted_slots == 10 + 8
    assert stats.kv_groups == (KVGroupStats(free=95, private=2, shared=3, cached=0),)
    assert stats.oldest_waiting_steps == 3


# --- bad calls -------------------------------------------------------------------------------------------------------


def test_bad_requests_are_refused_with_their_reason() -> None:
    driver = make_driver(capacity(100), max_model_len=50)
    cases = [
        (request(1, [], 5), "the prompt is empty"),
        (request(1, 50, 5), "the prompt has 50 tokens and leaves no room for output: the context holds 50"),
        (request(1, 51, 0), "the prompt has 51 tokens and leaves no room for output: the context holds 50"),
        (request(1, 5, 2, outputs=(1, 2)), "there is nothing left to generate after 7 tokens"),
    ]
    for bad, reason in cases:
        with pytest.raises(RequestRejected) as refusal:
            driver.add(bad)
        assert str(refusal.value) == reason
    driver.add(request(1, 5, 5, n=3))
    with pytest.raises(RequestRejected, match="request 1 is already here"):
        driver.add(request(1, 5, 5, choice_index=2))
    driver.add(request(1, 5, 5, choice_index=3))
    assert not driver.scheduler.abort(99)


@pytest.mark.parametrize("name", ["budget", "max_num_seqs", "max_model_len"])
def test_sizes_must_be_positive(name: str) -> None:
    sizes = {"budget": 1, "max_num_seqs": 1, "max_model_len": 1, name: 0}
    with pytest.raises(ConfigError, match="must be at least 1"):
        make_driver(capacity(10), **sizes)


def test_steps_are_updated_in_their_order() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 5, 5))
    first = driver.scheduler.schedule()
    second = driver.scheduler.schedule()
    results = [driver.executor.run(output) for output in (first, second)]
    with pytest.raises(EngineError, match="step 2 isn't the oldest"):
        driver.scheduler.update(second, results[1])
    with pytest.raises(EngineError, match="doesn't belong to step 1"):
        driver.scheduler.update(first, StepResult(1, ()))
    driver.scheduler.update(first, results[0])
    driver.scheduler.update(second, results[1])
    driver.scheduler.check_invariants()
    with pytest.raises(EngineError, match="step 2 isn't the oldest"):
        driver.scheduler.update(second, results[1])


def test_groups_are_planned_together() -> None:
    kv = KVCapacity(16, (KVGroupCapacity(21), KVGroupCapacity(6)))
    driver = make_driver(kv)
    with pytest.raises(RequestRejected, match="in KV group 1, which has 5"):
        driver.add(request(1, 80, 2))
    driver.add(request(2, 40, 8), request(3, 40, 8))  # three blocks each
    assert driver.run()[0] == [(2, 40)]
    assert {o.finish_reason for o in driver.outcomes.values() if o.token_ids} == {FinishReason.LENGTH}
