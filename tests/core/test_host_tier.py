"""The pool in the host's memory: preempted sequences that wait there, evicted prefixes that come back from there."""

from __future__ import annotations

import pytest

from engine.core.plan import BlockCopy, KVCapacity, KVGroupCapacity, SeqId
from engine.core.queue_policies import queue_factories
from engine.core.radix_cache import RadixCache
from engine.types import FinishReason, KVGroupStats, Pooling
from tests.choices import request
from tests.core.driver import Driver, capacity, expected_outputs, make_driver


def short_of_blocks(host_blocks: int = 20, copy_cost: int = 0, preemption: str = "auto") -> Driver:
    """Request 2 has computed 36 tokens, in blocks 3, 4, 6, and is about to be preempted."""
    driver = make_driver(capacity(6, host_blocks=host_blocks, copy_cost=copy_cost), preemption=preemption)
    driver.add(request(1, 32, 20), request(2, 20, 20))
    for _ in range(17):
        driver.step()
    return driver


def assert_all_as_alone(driver: Driver) -> None:
    for number, outcome in driver.outcomes.items():
        prompt, max_tokens = {1: (32, 20), 2: (20, 20)}[number.request_id]
        wanted = expected_outputs(request(number.request_id, prompt, max_tokens), number.choice_index, 8192, 1000)
        assert (tuple(outcome.token_ids), outcome.finish_reason) == wanted


# --- preempted sequences ---------------------------------------------------------------------------------------------


def test_a_preempted_sequence_is_parked_and_goes_on_where_it_stood() -> None:
    driver = short_of_blocks()
    output = driver.submit()
    driver.collect()
    assert [seq.seq_id.request_id for seq in output.seqs] == [1]
    assert output.swap_out == (BlockCopy(0, 3, 1), BlockCopy(0, 4, 2), BlockCopy(0, 6, 3))
    assert (output.forget, output.swap_in) == ((SeqId(2, 0),), ())
    stats = driver.scheduler.stats()
    assert (stats.preemptions_total, stats.parked_total, stats.preempted_tokens_total) == (1, 1, 0)
    assert (stats.num_waiting, stats.num_swapped) == (1, 1)
    # two full blocks are in the host's tree, the third is the sequence's own
    assert stats.kv_host_groups == (KVGroupStats(free=17, private=1, shared=2, cached=0),)
    assert [driver.step(), driver.step()] == [[(1, 1)], [(1, 1)]]
    output = driver.submit()  # 1 has ended; the device still has the two full blocks of 2
    [resumed] = output.seqs
    assert (resumed.start_position, len(resumed.token_ids), resumed.output_position) == (36, 1, 17)
    assert resumed.record is not None
    assert len(resumed.record.output_token_ids) == 17
    assert (output.swap_out, [copy.source for copy in output.swap_in]) == ((), [3])
    assert resumed.block_tables[0].block_ids[:2] == (3, 4)
    driver.collect()
    driver.run()
    assert driver.scheduler.stats().num_swapped == 0
    assert driver.outcomes[SeqId(2, 0)].num_cached_tokens == 0  # the hit at first admission
    assert driver.scheduler.stats().kv_host_groups == (KVGroupStats(free=18, private=0, shared=0, cached=2),)
    assert_all_as_alone(driver)


@pytest.mark.parametrize(("copy_cost", "parks"), [(6000, True), (6001, False)])
def test_whatever_costs_less(copy_cost: int, parks: bool) -> None:
    """Three blocks out and three in against 36 tokens: 6 × 6,000 thousandths of a token are 36 tokens."""
    driver = short_of_blocks(copy_cost=copy_cost)
    driver.run()
    assert driver.scheduler.stats().parked_total == parks
    assert driver.scheduler.stats().preempted_tokens_total == (0 if parks else 36)
    assert_all_as_alone(driver)


def test_what_the_host_has_already_is_not_sent_again_nor_counted() -> None:
    driver = short_of_blocks(copy_cost=9000)  # 1 block out, 3 in: four times 9 tokens
    keep = driver.scheduler.kv.before_eviction
    assert keep is not None
    cache = driver.scheduler.kv.cache
    assert isinstance(cache, RadixCache)
    node = cache.owner(0, 4)
    assert node is not None
    keep(node)
    output = driver.submit()
    driver.collect()
    assert [copy.source for copy in output.swap_out] == [3, 4, 6]  # the first two were sent before
    assert driver.scheduler.stats().parked_total == 1
    driver.run()
    assert_all_as_alone(driver)


@pytest.mark.parametrize(("preemption", "parked"), [("recompute", 0), ("swap", 1)])
def test_the_operator_decides(preemption: str, parked: int) -> None:
    driver = short_of_blocks(copy_cost=10**9, preemption=preemption)
    driver.run()
    assert driver.scheduler.stats().parked_total == parked
    assert_all_as_alone(driver)


def test_what_does_not_fit_is_computed_anew() -> None:
    driver = short_of_blocks(host_blocks=2)
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.parked_total, stats.preempted_tokens_total) == (0, 36)
    assert_all_as_alone(driver)


def test_a_parked_sequence_can_be_aborted() -> None:
    driver = short_of_blocks()
    driver.step()
    [update] = driver.abort(2)
    assert update.finish_reason is FinishReason.ABORT
    assert driver.scheduler.stats().kv_host_groups == (KVGroupStats(free=18, private=0, shared=0, cached=2),)
    driver.run()


def test_one_choice_of_a_parked_request_can_be_aborted() -> None:
    driver = make_driver(capacity(6, host_blocks=20), budget=16, max_model_len=64)
    driver.add(request(1, 32, 20))
    driver.step()
    driver.step()
    driver.add(request(2, 40, 10, n=3))  # three blocks and four to grow into: it has to wait
    for _ in range(8):
        driver.step()
    driver.abort(2, 0)
    driver.run()
    for choice, outcome in ((k, driver.outcomes[SeqId(2, k)]) for k in (1, 2)):
        assert tuple(outcome.token_ids) == expected_outputs(request(2, 40, 10), choice, 64, 1000)[0]


def test_choices_that_share_a_prompt_are_parked_with_one_copy_of_it() -> None:
    driver = make_driver(capacity(12, host_blocks=40), preemption="swap")
    driver.add(request(1, 64, 60, n=3, seed=5))
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.parked_total >= 2
    # each time at most the blocks behind the prompt's four are new
    assert stats.swapped_out_blocks_total <= 4 + 4 * stats.parked_total
    for choice in range(3):
        wanted = expected_outputs(request(1, 64, 60, seed=5), choice, 8192, 1000)[0]
        assert tuple(driver.outcomes[SeqId(1, choice)].token_ids) == wanted


def test_a_mean_over_hidden_states_is_not_parked() -> None:
    driver = make_driver(capacity(8, host_blocks=20), budget=16, queue=queue_factories(1000)["priority"])
    driver.add(request(1, 64, 0, priority=1, pooling=Pooling.MEAN))
    driver.step()
    driver.step()
    driver.add(request(2, 90, 1))
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.preemptions_total, stats.parked_total, stats.preempted_tokens_total) == (1, 0, 32)
    assert driver.outcomes[SeqId(1, 0)].embedding


def test_one_that_is_parked_in_the_middle_of_its_prompt_tells_each_logprob_once() -> None:
    driver = make_driver(capacity(8, host_blocks=20), budget=16, queue=queue_factories(1000)["priority"])
    driver.add(request(1, 60, 2, priority=1, prompt_logprobs=0))
    driver.step()
    driver.step()
    driver.add(request(2, 90, 1))
    plans = driver.run()
    assert sum(num_tokens for plan in plans for number, num_tokens in plan if number == 1) == 60 - 32 + 1
    told = [entry and entry.token_id for entry in driver.outcomes[SeqId(1, 0)].prompt_logprobs]
    assert told == [None, *request(1, 60).prompt_token_ids[1:]]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("windows", [(None,), (48, None), (40,)])
def test_four_times_as_much_as_there_is_room_for(
    depth: int, prefix_cache: bool, windows: tuple[int | None, ...]
) -> None:
    groups = tuple(KVGroupCapacity(14, window, 60) for window in windows)
    driver = make_driver(KVCapacity(16, groups), depth=depth, prefix_cache=prefix_cache, preemption="swap")
    requests = [request(number, 40, 60 + 5 * number, seed=number, n=1 + number % 2) for number in range(6)]
    driver.add(*requests)
    driver.run(max_steps=3000)
    stats = driver.scheduler.stats()
    assert stats.parked_total > 0
    assert stats.preempted_tokens_total == 0
    for one in requests:
        for choice in range(one.n):
            wanted = expected_outputs(one, choice, 8192, 1000)[0]
            assert tuple(driver.outcomes[SeqId(one.request_id, choice)].token_ids) == wanted
    for group in stats.kv_host_groups:
        assert (group.private, group.shared) == (0, 0)


# --- evicted prefixes ------------------------------------------------------------------------------------------------


def test_an_evicted_prefix_comes_back() -> None:
    driver = make_driver(capacity(8, host_blocks=8))
    driver.add(request(1, range(64), 1))
    driver.run()
    driver.add(request(2, 100, 1))  # seven blocks: four are free, three of 1 have to go
    output = driver.submit()
    driver.collect()
    # With the first eviction the whole path is copied, once.
    assert [copy.target for copy in output.swap_out] == [1, 2, 3, 4]
    assert driver.scheduler.stats().kv_host_groups == (KVGroupStats(free=4, private=0, shared=0, cached=4),)
    driver.add(request(3, [*range(64), 7], 1))
    output = driver.submit()
    driver.collect()
    assert [(seq.start_position, len(seq.token_ids)) for seq in output.seqs] == [(64, 1)]
    assert [copy.source for copy in output.swap_in] == [2, 3, 4]  # the device has kept the first
    assert driver.outcomes[SeqId(3, 0)].num_cached_tokens == 64
    stats = driver.scheduler.stats()
    assert (stats.prefix_hit_tokens_total, stats.swapped_in_blocks_total) == (64, 3)


def test_a_prefix_that_costs_more_to_copy_than_to_compute_stays_where_it_is() -> None:
    driver = make_driver(capacity(8, host_blocks=8, copy_cost=16_001))
    driver.add(request(1, range(64), 1))
    driver.run()
    driver.add(request(2, 100, 1))
    driver.run()
    driver.add(request(3, [*range(64), 7], 1))
    assert driver.run() == [[(3, 49)]]


def test_the_hosts_least_recently_used_prefix_goes_first() -> None:
    driver = make_driver(capacity(4, host_blocks=8))
    for number in (1, 2, 3, 4):  # each fills the device; what goes is kept
        driver.add(request(number, 64, 1))
        driver.run()
    for number, cached in ((2, 48), (1, 0)):
        driver.add(request(10 + number, request(number, 64).prompt_token_ids, 1))
        driver.run()
        assert driver.outcomes[SeqId(10 + number, 0)].num_cached_tokens == cached


def test_a_prefix_longer_than_the_hosts_pool_is_kept_as_far_as_it_goes() -> None:
    driver = make_driver(capacity(6, host_blocks=2))
    driver.add(request(1, 90, 1), request(2, 90, 1))
    driver.run()
    driver.add(request(3, request(1, 90).prompt_token_ids, 1))
    assert driver.run() == [[(3, 58)]]


def test_namespaces_do_not_share_the_host_either() -> None:
    driver = make_driver(capacity(4, host_blocks=8))
    driver.add(request(1, range(64), 1, namespace=1))
    driver.run()
    driver.add(request(2, 60, 1))
    driver.run()
    driver.add(request(3, range(64), 1, namespace=2))
    assert driver.run() == [[(3, 64)]]


def test_a_reset_forgets_the_hosts_prefixes_but_not_what_is_parked() -> None:
    driver = short_of_blocks()
    driver.step()
    driver.scheduler.reset_prefix_cache()
    assert driver.scheduler.stats().kv_host_groups == (KVGroupStats(free=17, private=1, shared=2, cached=0),)
    driver.run()
    driver.scheduler.reset_prefix_cache()
    assert driver.scheduler.stats().kv_host_groups == (KVGroupStats(free=20, private=0, shared=0, cached=0),)
    assert_all_as_alone(driver)


def test_a_request_does_not_wait_for_a_prefix_that_the_host_has() -> None:
    driver = make_driver(capacity(8, host_blocks=8), budget=32)
    driver.add(request(1, range(64), 1))
    driver.run()
    driver.scheduler.kv.reset_prefix_cache()
    assert driver.scheduler.host is not None
    driver.add(request(2, 120, 1))
    driver.run()
    driver.scheduler.kv.reset_prefix_cache()
    driver.add(request(3, range(64), 2), request(4, [*range(64), 7], 2))
    assert driver.step() == [(3, 32)]
