"""How choices end, and what is told about them."""

from __future__ import annotations

import pytest

from engine.core.plan import SchedulerOutput, SeqId, SeqResult, StepResult
from engine.types import FinishReason, GenerationRequest, Pooling, RequestUpdate, TokenLogprobs
from tests.choices import request
from tests.core.driver import Driver, capacity, make_driver


def play(one: GenerationRequest, tokens: list[tuple[int, ...]], *, max_model_len: int = 1000) -> list[RequestUpdate]:
    """The updates of a request whose steps sample these tokens."""
    driver = make_driver(capacity(100), max_model_len=max_model_len)
    driver.scheduler.add(one)
    updates = []
    for sampled in tokens:
        updates += driver.scheduler.update(*answer(driver.scheduler.schedule(), sampled))
    assert not driver.scheduler.has_work()
    driver.scheduler.check_invariants()
    return updates


def answer(output: SchedulerOutput, sampled: tuple[int, ...]) -> tuple[SchedulerOutput, StepResult]:
    logprobs = tuple([TokenLogprobs(t, -1.0, 1, ()) for t in sampled])
    return output, StepResult(output.step_id, tuple([SeqResult(s.seq_id, sampled, logprobs) for s in output.seqs]))


def test_a_stop_token_ends_a_choice_and_is_told() -> None:
    *_, last = play(request(1, 5, 9, stop=(7, 8)), [(1,), (2,), (8,)])
    assert last == RequestUpdate(
        1, 0, (8,), (TokenLogprobs(8, -1.0, 1, ()),), finish_reason=FinishReason.STOP, stop_token_id=8
    )


def test_a_stop_token_before_min_tokens_does_not_end_it() -> None:
    updates = play(request(1, 5, 9, stop=(7,), min_tokens=2), [(7,), (7,), (7,)])
    assert [(u.new_token_ids, u.finish_reason) for u in updates] == [
        ((7,), None),
        ((7,), None),
        ((7,), FinishReason.STOP),
    ]


def test_max_tokens_ends_it_by_length() -> None:
    updates = play(request(1, 5, 2), [(1,), (2,)])
    assert [(u.new_token_ids, u.finish_reason) for u in updates] == [((1,), None), ((2,), FinishReason.LENGTH)]


def test_the_context_ends_it_by_length() -> None:
    updates = play(request(1, 5, 100), [(1,), (2,), (3,)], max_model_len=8)
    assert updates[-1].finish_reason is FinishReason.LENGTH
    assert len(updates) == 3


def test_a_stop_token_as_the_last_possible_output_is_a_stop() -> None:
    assert play(request(1, 5, 2, stop=(9,)), [(1,), (9,)])[-1].finish_reason is FinishReason.STOP


def test_several_tokens_of_one_step_are_taken_up_to_the_one_that_ends_it() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 5, 9, stop=(7,)))
    [update] = driver.scheduler.update(*answer(driver.scheduler.schedule(), (1, 2, 3)))
    assert update.new_token_ids == (1, 2, 3)
    output = driver.scheduler.schedule()
    assert output.seqs[0].token_ids == (1, 2, 3)
    assert (output.seqs[0].start_position, output.seqs[0].output_position) == (5, 3)
    [update] = driver.scheduler.update(*answer(output, (4, 7, 8)))
    assert (update.new_token_ids, update.stop_token_id, len(update.logprobs)) == ((4, 7), 7, 2)
    assert driver.scheduler.stats().overrun_tokens_total == 1
    assert driver.scheduler.stats().prefix_hit_tokens_total == 0


def test_a_replayed_choice_goes_on_where_it_stood() -> None:
    whole = make_driver(capacity(100))
    whole.add(request(1, 20, 8, n=2, seed=5))
    whole.run()
    tokens = whole.outcomes[SeqId(1, 1)].token_ids
    again = make_driver(capacity(100))
    again.add(request(1, 20, 8, seed=5, choice_index=1, outputs=tuple(tokens[:3])))
    output = again.submit()
    assert output.seqs[0].output_position == 3
    again.run()
    assert again.outcomes[SeqId(1, 1)].token_ids == tokens[3:]
    assert again.outcomes[SeqId(1, 1)].finish_reason is FinishReason.LENGTH


# --- prompts only ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", list(Pooling))
def test_an_embedding_ends_by_length_without_sampling(pooling: Pooling) -> None:
    driver = make_driver(capacity(100), budget=16)
    driver.add(request(1, 40, 0, pooling=pooling))
    outputs = [driver.submit()]
    while driver.scheduler.has_work():
        driver.collect()
        outputs.append(driver.submit())
    seqs = [seq for output in outputs for seq in output.seqs]
    assert [(len(seq.token_ids), seq.sample, seq.num_logits_rows) for seq in seqs] == [
        (16, False, 0),
        (16, False, 0),
        (8, False, 0),
    ]
    outcome = driver.outcomes[SeqId(1, 0)]
    assert (outcome.token_ids, outcome.finish_reason, len(outcome.embedding)) == ([], FinishReason.LENGTH, 1)


def test_mean_pooling_does_not_read_the_cache_and_last_pooling_does() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(40), 1))
    driver.run()
    driver.add(request(2, range(40), 0, pooling=Pooling.MEAN))
    driver.add(request(3, range(40), 0, pooling=Pooling.LAST))
    assert driver.run() == [[(2, 40), (3, 8)]]


def test_all_choices_of_a_prompt_without_output_end_together() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 40, 0, n=3))
    assert driver.run() == [[(1, 40)]]
    assert [o.finish_reason for o in driver.outcomes.values()] == [FinishReason.LENGTH] * 3


# --- prompt logprobs -------------------------------------------------------------------------------------------------


def told(driver: Driver, seq_id: SeqId) -> list[int | None]:
    return [None if p is None else p.token_id for p in driver.outcomes[seq_id].prompt_logprobs]


def test_prompt_logprobs_ask_for_all_rows_of_each_chunk() -> None:
    driver = make_driver(capacity(100), budget=16)
    driver.add(request(1, range(40), 2, prompt_logprobs=1))
    rows = []
    while driver.scheduler.has_work():
        rows += [(len(seq.token_ids), seq.num_logits_rows) for seq in driver.submit().seqs]
        driver.collect()
    assert rows == [(16, 16), (16, 16), (8, 8), (1, 1)]
    assert told(driver, SeqId(1, 0)) == [None, *range(1, 40)]


def test_prompt_logprobs_do_not_read_the_cache() -> None:
    driver = make_driver(capacity(100))
    for request_id in (1, 2):
        driver.add(request(request_id, range(60), 1, prompt_logprobs=0))
        assert driver.run() == [[(request_id, 60)]]
        assert told(driver, SeqId(request_id, 0)) == [None, *range(1, 60)]
    stats = driver.scheduler.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (0, 0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 16, 17, 40])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_every_choice_is_told_the_prompt_logprobs_once(depth: int, num_prompt_tokens: int, max_tokens: int) -> None:
    driver = make_driver(capacity(100), budget=16, max_num_seqs=3, depth=depth)
    driver.add(request(1, range(num_prompt_tokens), max_tokens, n=5, prompt_logprobs=0))
    driver.run()
    for choice_index in range(5):
        assert told(driver, SeqId(1, choice_index)) == [None, *range(1, num_prompt_tokens)]


def test_a_replayed_choice_with_outputs_has_been_told_its_prompt() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, range(40), 5, outputs=(1, 2), prompt_logprobs=0))
    assert driver.submit().seqs[0].num_logits_rows == 1


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_ends_its_choice_alone() -> None:
    driver = make_driver(capacity(100))
    driver.add(request(1, 20, 4), request(2, 20, 4))
    driver.step()
    driver.executor.failing[SeqId(1, 0)] = "scripted"
    driver.run()
    assert [(o.finish_reason, o.error, len(o.token_ids)) for o in driver.outcomes.values()] == [
        (FinishReason.ERROR, "scripted", 1),
        (FinishReason.LENGTH, None, 4),
    ]


def test_what_a_failed_step_wrote_does_not_enter_the_cache() -> None:
    driver = make_driver(capacity(100), budget=32)
    driver.add(request(1, range(64), 1))
    driver.step()
    driver.executor.failing[SeqId(1, 0)] = "scripted"
    driver.step()
    driver.add(request(2, range(64), 1))
    assert driver.run() == [[(2, 32)]]
    assert driver.outcomes[SeqId(2, 0)].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
def test_an_error_in_the_shared_prompt_ends_all_choices(depth: int) -> None:
    driver = make_driver(capacity(100), depth=depth)
    driver.add(request(1, 40, 4, n=3), request(2, 20, 1))
    driver.executor.failing[SeqId(1, 0)] = "scripted"
    driver.run()
    reasons = [o.finish_reason for o in driver.outcomes.values()]
    assert reasons == [FinishReason.ERROR] * 3 + [FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("max_tokens", "sampled", "error"),
    [
        (3, (), "the executor sampled no token"),
        (0, (5,), "the executor sampled a token that nobody asked for"),
    ],
)
def test_a_result_that_breaks_its_promise_ends_the_choice(
    max_tokens: int, sampled: tuple[int, ...], error: str
) -> None:
    [update] = play(request(1, 5, max_tokens), [sampled])
    assert (update.finish_reason, update.error, update.new_token_ids) == (FinishReason.ERROR, error, ())


def test_several_tokens_while_the_next_is_being_sampled_end_the_choice() -> None:
    driver = make_driver(capacity(100))
    driver.scheduler.add(request(1, 5, 9))
    first, second = driver.scheduler.schedule(), driver.scheduler.schedule()
    [update] = driver.scheduler.update(*answer(first, (1, 2)))
    assert update.error == "the executor gave several tokens while the next was being sampled"
    assert driver.scheduler.update(*answer(second, (3,))) == []
    driver.scheduler.check_invariants()
