"""A prefix that is being computed right now is waited for, not computed again."""

from __future__ import annotations

from engine.core.plan import SeqId
from tests.choices import request
from tests.core.driver import capacity, make_driver


def test_an_equal_prompt_waits_for_the_step_that_computes_it() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(64), 3), request(2, range(64), 3))
    assert driver.run() == [[(1, 64)], [(1, 1), (2, 16)], [(1, 1), (2, 1)], [(2, 1)]]
    assert driver.outcomes[SeqId(2, 0)].num_cached_tokens == 48


def test_others_pass_by_the_one_that_waits() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(64), 2), request(2, range(64), 2), request(3, 10, 2))
    assert driver.step() == [(1, 64), (3, 10)]
    assert driver.step() == [(1, 1), (3, 1), (2, 16)]


def test_sixteen_requests_with_a_common_system_prompt_compute_it_once() -> None:
    driver = make_driver(capacity(1000), budget=2048)
    system = list(range(512))
    driver.add(*[request(k, [*system, *range(1000 * k, 1000 * k + 32)], 2) for k in range(1, 17)])
    assert driver.step() == [(1, 544)]
    assert driver.step() == [(1, 1), *[(k, 32) for k in range(2, 17)]]
    assert driver.executor.num_tokens == 544 + 1 + 15 * 32


def test_it_waits_for_as_much_as_both_have_in_common() -> None:
    driver = make_driver(capacity(100), budget=40)
    driver.add(request(1, [*range(80), *range(500, 530)], 1), request(2, [*range(80), 7, 7], 1))
    # 1 has 40, 80, 110 tokens: the fifth block is complete with the second step
    assert driver.run() == [[(1, 40)], [(1, 40)], [(1, 30), (2, 2)]]


def test_a_prompt_with_nothing_in_common_does_not_wait() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(64), 1), request(2, [*range(15), 99, *range(16, 64)], 1))
    assert driver.run() == [[(1, 64), (2, 64)]]


def test_namespaces_do_not_wait_for_each_other() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(64), 1), request(2, range(64), 1, namespace=1))
    assert driver.run() == [[(1, 64), (2, 64)]]


def test_a_request_that_reads_no_cache_does_not_wait() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(64), 1), request(2, range(64), 1, prompt_logprobs=0))
    assert driver.run() == [[(1, 64), (2, 64)]]


def test_the_wait_is_bounded_in_steps() -> None:
    driver = make_driver(capacity(100), max_prefix_wait_steps=2)
    driver.add(request(1, range(64), 9), request(2, range(64), 1))
    plans = [[(s.seq_id.request_id, len(s.token_ids)) for s in driver.submit().seqs] for _ in range(3)]
    assert plans == [[(1, 64)], [(1, 1)], [(1, 1), (2, 64)]]  # nothing is updated meanwhile
    driver.run()


def test_with_a_bound_of_zero_nobody_waits() -> None:
    driver = make_driver(capacity(100), max_prefix_wait_steps=0)
    driver.add(request(1, range(64), 1), request(2, range(64), 1))
    assert driver.run() == [[(1, 64), (2, 64)]]
    assert driver.scheduler.kv.pools[0].num_cached == 4  # the duplicates are free again


def test_nobody_waits_for_one_that_is_gone() -> None:
    driver = make_driver(capacity(100), budget=40)
    driver.add(request(1, range(100), 1), request(2, range(100), 1))
    driver.step()
    driver.abort(1)
    assert driver.run() == [[(2, 40)], [(2, 28)]]  # 32 tokens were in the cache already
