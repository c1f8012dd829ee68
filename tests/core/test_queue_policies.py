"""Who is admitted when, under each policy; and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.core.plan import SeqId
from engine.core.queue import CachedTokens, QueuePolicy
from engine.core.queue_policies import MEASURED_WAITERS, queue_factories
from engine.core.request import Sequence
from engine.types import FinishReason, GenerationRequest
from tests.choices import request
from tests.core.driver import Driver, capacity, expected_outputs, make_driver

NEVER = 1_000_000
POLICIES = ["sjf", "priority", "fair", "lpm"]


def one_at_a_time(policy: str, max_wait_steps: int = NEVER, num_blocks: int = 1000) -> Driver:
    return make_driver(capacity(num_blocks), max_num_seqs=1, queue=queue_factories(max_wait_steps)[policy])


def order(driver: Driver) -> list[int]:
    """The requests in the order in which they first ran, all run to their end."""
    return list(dict.fromkeys(request_id for plan in driver.run() for request_id, _ in plan))


# --- first come, first served ----------------------------------------------------------------------------------------


def test_first_come_first_served_looks_at_nothing_else() -> None:
    driver = one_at_a_time("fcfs")
    driver.add(request(1, 90, 9, priority=5), request(2, 3, 4, priority=-5), request(3, 8, 1, tenant=1))
    assert order(driver) == [1, 2, 3]


# --- shortest job first ----------------------------------------------------------------------------------------------


def test_the_shortest_job_goes_first_and_of_equals_the_older() -> None:
    driver = one_at_a_time("sjf")
    driver.add(request(1, 10, 5), request(2, 3, 4), request(3, 8, 1), request(4, 4, 3), request(5, 1, 2, n=9))
    assert order(driver) == [2, 4, 3, 1, 5]  # 15, 7, 9, 7 and 1 + 9 × 2 tokens to run


def test_a_cached_prompt_makes_a_job_short() -> None:
    driver = one_at_a_time("sjf")
    driver.add(request(1, range(64), 1))
    driver.run()
    driver.add(request(2, 30, 4), request(3, [*range(64), 7], 4))
    assert order(driver) == [3, 2]  # 1 + 4 against 30 + 4


def test_a_prompt_that_is_cached_while_its_request_waits_makes_it_shorter() -> None:
    driver = one_at_a_time("sjf")
    driver.add(request(1, range(64), 1), request(2, 70, 4), request(3, [*range(64), *[7] * 16], 4))
    assert order(driver) == [1, 3, 2]  # 3 had 84 tokens to run when it came


def test_what_is_left_of_a_resumed_job_counts() -> None:
    driver = one_at_a_time("sjf")
    driver.add(request(1, 10, 30, outputs=tuple(range(28))), request(2, 30, 1), request(3, 41, 0))
    assert order(driver) == [2, 1, 3]  # 38 + 2, 30 + 1 and 41 tokens to run


# --- longest prefix match --------------------------------------------------------------------------------------------


def test_the_longest_match_goes_first() -> None:
    driver = one_at_a_time("lpm")
    driver.add(request(1, range(100), 1))
    driver.run()
    driver.add(request(2, 5, 1), request(3, [*range(32), 7], 1), request(4, [*range(80), 7], 1), request(5, 9, 1))
    assert order(driver) == [4, 3, 2, 5]


def test_only_the_longest_waiting_are_measured_again() -> None:
    asked: list[int] = []

    def cached_tokens(sequence: Sequence) -> int:
        asked.append(sequence.seq_id.request_id)
        return 0

    queue = queue_factories(NEVER)["lpm"](cached_tokens)
    for number in range(MEASURED_WAITERS + 10):
        queue.push(Sequence(request(number, 4), 100, step_id=0))
    asked.clear()
    assert queue.pop(1).seq_id.request_id == 0
    queue.pop(1)
    assert asked == list(range(MEASURED_WAITERS))


# --- priority --------------------------------------------------------------------------------------------------------


def test_the_lowest_priority_value_goes_first_and_of_equals_the_older() -> None:
    driver = one_at_a_time("priority")
    driver.add(*[request(number, 4, 2, priority=value) for number, value in enumerate([0, 3, -2, 0, 3, -2])])
    assert order(driver) == [2, 5, 0, 3, 1, 4]


def test_a_higher_priority_takes_the_place_of_the_lowest_that_came_last() -> None:
    driver = make_driver(capacity(100), max_num_seqs=3, queue=queue_factories(NEVER)["priority"])
    driver.add(request(1, 4, 6, priority=5), request(2, 4, 6, priority=1), request(3, 4, 6, priority=5))
    assert driver.step() == [(2, 4), (1, 4), (3, 4)]
    driver.add(request(4, 4, 2, priority=1), request(5, 4, 2, priority=5))
    assert driver.step() == [(2, 1), (1, 1), (4, 4)]
    assert driver.step() == [(2, 1), (4, 1), (1, 1)]  # 4 stands before 1 from its first step on
    # 3 was here before 5: it comes back first, with the one token it had and its prompt
    assert driver.step() == [(2, 1), (1, 1), (3, 5)]
    assert driver.scheduler.stats().preemptions_total == 1
    driver.run()
    for number in range(1, 6):
        outcome = driver.outcomes[SeqId(number, 0)]
        wanted = expected_outputs(request(number, 4, 6 if number < 4 else 2), 0, 8192, 1000)
        assert (tuple(outcome.token_ids), outcome.finish_reason) == wanted


def test_a_higher_priority_takes_blocks() -> None:
    driver = make_driver(capacity(8), queue=queue_factories(NEVER)["priority"])
    driver.add(request(1, 30, 20, priority=1), request(2, 30, 20, priority=2))
    assert driver.step() == [(1, 30), (2, 30)]
    driver.add(request(3, 40, 2))
    assert driver.step() == [(1, 1), (3, 40)]
    assert [seq.seq_id.request_id for seq in driver.scheduler.roster.running] == [3, 1]


def test_equals_are_not_preempted_nor_are_the_better() -> None:
    driver = one_at_a_time("priority")
    driver.add(request(1, 4, 4, priority=1))
    driver.step()
    driver.add(request(2, 4, 4, priority=1), request(3, 4, 4, priority=2))
    assert order(driver) == [1, 2, 3]
    assert driver.scheduler.stats().preemptions_total == 0


def test_of_those_short_of_blocks_the_lowest_priority_gives_way() -> None:
    driver = make_driver(capacity(6), queue=queue_factories(NEVER)["priority"])
    driver.add(request(1, 20, 20, priority=9), request(2, 32, 20, priority=1))
    for _ in range(17):
        assert [request_id for request_id, _ in driver.step()] == [2, 1]
    assert driver.step() == [(2, 1)]  # it was admitted later, but stands first
    driver.run()
    assert driver.scheduler.stats().preemptions_total == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_choices_keep_their_requests_priority(depth: int) -> None:
    queue = queue_factories(NEVER)["priority"]
    driver = make_driver(capacity(100), max_num_seqs=3, depth=depth, queue=queue)
    driver.add(request(1, 20, 9, n=4, priority=4))
    driver.step()
    driver.step()
    driver.add(request(2, 20, 3, n=2, priority=1))
    driver.step()
    driver.step()
    driver.add(request(3, 5, 3, priority=3))
    driver.run()
    plans = driver.plans
    first = {number: min(i for i, plan in enumerate(plans) if number in dict(plan)) for number in (2, 3)}
    last = {number: max(i for i, plan in enumerate(plans) if number in dict(plan)) for number in (1, 2, 3)}
    assert first[2] < first[3]
    assert last[2] <= last[3] < last[1]
    assert driver.scheduler.stats().preemptions_total > 0
    for (number, choice), outcome in driver.outcomes.items():
        one = {1: request(1, 20, 9), 2: request(2, 20, 3), 3: request(3, 5, 3)}[number]
        assert tuple(outcome.token_ids) == expected_outputs(one, choice, 8192, 1000)[0]


# --- fair ------------------------------------------------------------------------------------------------------------


def test_the_tenant_that_was_served_least_goes_first() -> None:
    driver = one_at_a_time("fair")
    driver.add(*[request(number, 10, 10, tenant=1) for number in (1, 2, 3)])
    driver.add(request(4, 30, 10, tenant=2), request(5, 5, 5, tenant=2))
    # each pays its prompt when it is admitted and its outputs as they come: 20 : 0, 20 : 40, 40 : 40, 60 : 40
    assert order(driver) == [1, 4, 2, 3, 5]


def test_within_one_step_places_are_shared() -> None:
    driver = make_driver(capacity(1000), max_num_seqs=4, queue=queue_factories(NEVER)["fair"])
    driver.add(*[request(number, 10, 4, tenant=1) for number in (1, 2, 3, 4)])
    driver.add(*[request(number, 10, 4, tenant=2) for number in (5, 6)])
    assert driver.step() == [(1, 10), (5, 10), (2, 10), (6, 10)]


def test_being_away_earns_no_credit() -> None:
    driver = one_at_a_time("fair")
    driver.add(*[request(number, 50, 50, tenant=1) for number in (1, 2, 3)])
    for _ in range(75):
        driver.step()
    driver.add(*[request(number, 10, 10, tenant=2) for number in (4, 5, 6, 7, 8, 9, 10)])
    # tenant 1 had paid 100 tokens when 2 was admitted: there tenant 2 begins, and with 8 it has come to the 200 of 1
    assert order(driver) == [2, 4, 5, 6, 7, 8, 3, 9, 10]


def test_what_was_popped_and_not_admitted_is_not_paid_for() -> None:
    queue = queue_factories(NEVER)["fair"](lambda sequence: 0)
    first, second = (Sequence(request(number, 40, tenant=number), 100, step_id=0) for number in (1, 2))
    queue.push(first)
    queue.push(second)
    for step_id in range(5):
        assert queue.pop(step_id) is first
        queue.unpop(first)
    assert queue.pop(5) is first
    assert queue.pop(5) is second


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_what_has_run_before_goes_first(policy: str) -> None:
    queue = queue_factories(NEVER)[policy](lambda sequence: 0)
    fresh, again, choice = (Sequence(request(number, 40), 100, step_id=0) for number in (1, 2, 3))
    queue.push(fresh)
    queue.push_front(again)
    queue.push_front(choice)
    assert len(queue) == 3
    assert [queue.pop(1) for _ in range(3)] == [choice, again, fresh]
    assert len(queue) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_pops_are_undone(policy: str) -> None:
    queue = queue_factories(5)[policy](lambda sequence: sequence.seq_id.request_id % 7)
    for number in range(20):
        queue.push(Sequence(request(number, 1 + number % 3, priority=number % 4, tenant=number % 5), 100, number))
    popped = [queue.pop(12) for _ in range(15)]
    for sequence in reversed(popped):
        queue.unpop(sequence)
    assert [queue.pop(12) for _ in range(15)] == popped


@pytest.mark.parametrize("policy", POLICIES)
def test_a_waiting_sequence_can_be_taken_out_once(policy: str) -> None:
    queue = queue_factories(NEVER)[policy](lambda sequence: 0)
    sequences = [Sequence(request(number, 4), 100, step_id=0) for number in range(3)]
    for sequence in sequences:
        queue.push(sequence)
    queue.remove(sequences[1])
    with pytest.raises(KeyError):
        queue.remove(sequences[1])
    assert list(queue) == [sequences[0], sequences[2]]


# --- ageing ----------------------------------------------------------------------------------------------------------

VICTIM = 1


def never_first(policy: str) -> tuple[GenerationRequest, Callable[[int], GenerationRequest]]:
    """A request, and how to make others without end that the policy likes better."""
    if policy == "sjf":
        return request(VICTIM, 40, 9), lambda number: request(number, 2, 2)
    if policy == "lpm":
        return request(VICTIM, 40, 2), lambda number: request(number, [*range(64), number], 2)
    if policy == "priority":
        return request(VICTIM, 4, 2, priority=1000), lambda number: request(number, 2, 2, priority=-1000)
    return request(VICTIM, 4, 2, tenant=0), lambda number: request(number, 2, 2, tenant=number)  # a new tenant each


@pytest.mark.parametrize("max_wait_steps", [10, 37, 100])
@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_waits_longer_than_the_bound(policy: str, max_wait_steps: int) -> None:
    """The bound: after max_wait_steps steps in the queue the next place is its own. Here a place comes free at least
    every 2 steps, and those that came before it are done by then."""
    driver = one_at_a_time(policy, max_wait_steps)
    if policy == "fair":  # the victim's tenant has had far more than all that will come
        driver.add(request(2, 100, 100, tenant=0))
        driver.run()
    victim, favourite = never_first(policy)
    if policy == "lpm":
        driver.add(request(2, range(64), 1))
        driver.run()
    driver.add(favourite(10))
    driver.step()
    driver.add(victim)
    came_at = driver.scheduler.roster.step_id
    number = 10
    while VICTIM not in dict(driver.plans[-1]):
        while len(driver.scheduler.roster.queue) < 3:  # there is always one that the policy likes better
            number += 1
            driver.add(favourite(number))
        driver.step()
        assert driver.scheduler.roster.step_id <= came_at + max_wait_steps + 2
    waited = driver.scheduler.roster.step_id - came_at
    assert waited > (1 if policy == "fair" else max_wait_steps - 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_overdue_go_first_the_longest_waiting_before_the_others(policy: str) -> None:
    queue = queue_factories(10)[policy](lambda sequence: sequence.seq_id.request_id)
    for number in range(4):
        arriving = request(number, 40 - number, priority=9 - number, tenant=number)
        queue.push(Sequence(arriving, 100, step_id=number))
    fresh = Sequence(request(9, 1, priority=-1, tenant=9), 100, step_id=11)
    queue.push(fresh)
    assert [queue.pop(12).seq_id.request_id for _ in range(3)] == [0, 1, 2]  # 3 came 9 steps ago
    assert queue.pop(12) is fresh if policy != "fair" else True


def test_an_overdue_sequence_is_not_preempted_for_a_priority() -> None:
    driver = one_at_a_time("priority", max_wait_steps=5)
    driver.add(request(1, 4, 8))
    driver.step()
    driver.add(request(2, 4, 30, priority=9))
    for _ in range(8):
        driver.step()
    assert [seq.overdue for seq in driver.scheduler.roster.running] == [True]
    driver.add(request(3, 4, 1, priority=-9))
    assert order(driver) == [2, 3]
    assert driver.scheduler.stats().preemptions_total == 0


def test_an_overdue_sequence_preempts_nobody() -> None:
    driver = one_at_a_time("priority", max_wait_steps=5)
    driver.add(request(1, 4, 50, priority=5))
    driver.step()
    driver.add(request(2, 4, 2, priority=7))
    for _ in range(40):
        assert driver.step() == [(1, 1)]
    assert order(driver) == [1, 2]


@pytest.mark.parametrize("policy", ["fcfs", *POLICIES])
def test_who_waits_can_be_aborted_at_any_place(policy: str) -> None:
    driver = one_at_a_time(policy)
    driver.add(*[request(number, 4, 2, tenant=number % 2, priority=number % 3) for number in range(6)])
    driver.step()
    for number in (3, 0, 5):
        driver.abort(number)
    driver.run()
    ends = {number: driver.outcomes[SeqId(number, 0)].finish_reason for number in range(6)}
    assert [number for number, reason in ends.items() if reason is FinishReason.ABORT] == [0, 3, 5]


def test_every_policy_is_a_policy() -> None:
    def no_cache(sequence: Sequence) -> int:
        return 0

    measure: CachedTokens = no_cache
    queues: dict[str, QueuePolicy] = {name: make(measure) for name, make in queue_factories(5).items()}
    assert [name for name, queue in queues.items() if queue.preempts] == ["priority"]
