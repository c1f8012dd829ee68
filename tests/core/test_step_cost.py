"""Chunks of prompts under a cost: exactly how many tokens each step runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.core.step_cost import StepCost
from tests.choices import request
from tests.core.driver import capacity, make_driver


@given(
    cost=st.builds(StepCost, *(st.integers(0, 10**6) for _ in range(4))),
    start=st.integers(0, 10**6),
    left=st.integers(-5, 10**9),
)
def test_what_fits_is_affordable_and_one_more_would_not_be(cost: StepCost, start: int, left: int) -> None:
    fitting = cost.fitting(start, left)
    assert fitting >= 0
    if fitting:
        assert cost.of_chunk(start, fitting) <= left
    if cost.per_token or cost.per_key:
        assert cost.of_chunk(start, fitting + 1) > left


def test_a_chunk_costs_its_tokens_and_the_keys_that_they_see() -> None:
    cost = StepCost(limit=1000, per_step=0, per_token=10, per_key=1)
    assert cost.of_chunk(0, 1) == 10 + 1
    assert cost.of_chunk(100, 3) == 30 + 101 + 102 + 103


def test_decodes_leave_the_rest_and_a_quarter_at_least() -> None:
    cost = StepCost(limit=1000, per_step=100, per_token=10, per_key=1)
    assert cost.for_chunks([]) == 900
    assert cost.for_chunks([50, 70]) == 900 - 20 - 120
    assert cost.for_chunks([400, 400]) == 250


def test_chunks_shrink_as_the_context_grows() -> None:
    driver = make_driver(capacity(1000), step_cost=StepCost(limit=100, per_step=0, per_token=4, per_key=0))
    driver.add(request(1, 60, 1))
    assert driver.run() == [[(1, 25)], [(1, 25)], [(1, 10)]]
    driver = make_driver(capacity(1000), step_cost=StepCost(limit=1000, per_step=0, per_token=10, per_key=1))
    driver.add(request(1, 100, 1))
    sizes = [step[0][1] for step in driver.run()]
    assert sizes == [35, 18, 14, 11, 10, 9, 3]


def test_a_chunk_beside_decodes_gets_what_they_leave_and_the_next_prompt_waits() -> None:
    driver = make_driver(capacity(1000), step_cost=StepCost(limit=100, per_step=10, per_token=2, per_key=0))
    driver.add(request(1, 20, 9), request(2, 20, 9))
    assert driver.step() == [(1, 20), (2, 20)]
    driver.add(request(3, 60, 2), request(4, 30, 1))
    assert driver.step() == [(1, 1), (2, 1), (3, 43)]
    assert driver.step() == [(1, 1), (2, 1), (3, 17), (4, 26)]
    assert driver.step() == [(1, 1), (2, 1), (3, 1), (4, 4)]


def test_the_budget_in_tokens_still_holds() -> None:
    driver = make_driver(capacity(1000), budget=8, step_cost=StepCost(limit=1000, per_step=0, per_token=1, per_key=0))
    driver.add(request(1, 20, 1))
    assert driver.run() == [[(1, 8)], [(1, 8)], [(1, 4)]]


def test_a_token_that_costs_more_than_a_step_runs_alone() -> None:
    driver = make_driver(capacity(1000), step_cost=StepCost(limit=1, per_step=5, per_token=100, per_key=100))
    driver.add(request(1, 3, 2), request(2, 2, 1))
    assert driver.run() == [[(1, 1)]] * 3 + [[(1, 1), (2, 1)], [(2, 1)]]


def test_a_prefix_in_the_cache_costs_its_keys_alone() -> None:
    driver = make_driver(capacity(1000), step_cost=StepCost(limit=1000, per_step=0, per_token=10, per_key=1))
    driver.add(request(1, range(64), 1))
    driver.run()
    driver.add(request(2, [*range(64), *range(100, 120)], 1))
    before = len(driver.plans)
    driver.run()
    assert driver.plans[before:] == [[(2, 12)], [(2, 8)]]
