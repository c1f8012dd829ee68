"""The table of accepted requests: one terminal update each, and records that carry on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from engine.core.plan import SeqId
from engine.inflight import Entry, InFlight
from engine.types import ErrorKind, FinishReason, GenerationRequest, RequestUpdate, SamplingParams, TokenLogprobs

REQUEST = GenerationRequest(request_id=1, prompt_token_ids=(1, 2, 3), sampling=SamplingParams(10), seed=5)
LOGPROBS = TokenLogprobs(2, -0.5, 1, ())


def taken(entry: Entry) -> list[RequestUpdate]:
    updates, entry.pending = entry.pending, []
    return updates


def accepted(table: InFlight, request: GenerationRequest = REQUEST) -> Entry:
    entry = table.add(request)
    assert table.take(entry) == [request]
    return entry


def token(token_id: int, request_id: int = 1, choice_index: int = 0, **rest: Any) -> RequestUpdate:
    return RequestUpdate(request_id, choice_index, (token_id,), **rest)


def test_updates_reach_their_request_in_order() -> None:
    table = InFlight()
    first, second = accepted(table), accepted(table, replace(REQUEST, request_id=2))
    table.deliver([token(7), token(8, request_id=2), token(9)])
    assert taken(first) == [token(7), token(9)]
    assert taken(second) == [token(8, request_id=2)]


def test_a_request_leaves_the_table_with_the_end_of_its_last_choice() -> None:
    table = InFlight()
    entry = accepted(table, replace(REQUEST, n=2))
    table.deliver([token(7, choice_index=1, finish_reason=FinishReason.STOP)])
    assert len(table) == 1
    table.deliver([token(7, finish_reason=FinishReason.LENGTH)])
    assert (len(table), entry.finished) == (0, True)


def test_nothing_follows_a_terminal_update() -> None:
    table = InFlight()
    entry = accepted(table, replace(REQUEST, n=2))
    end = RequestUpdate(1, 0, finish_reason=FinishReason.ABORT)
    table.deliver([end, end, token(7)])
    table.finish(SeqId(1, 0), FinishReason.ERROR, "late")
    assert taken(entry) == [end]


def test_an_id_in_use_is_refused() -> None:
    table = InFlight()
    accepted(table)
    with pytest.raises(ValueError, match="in use"):
        table.add(REQUEST)


def test_a_replay_starts_from_all_tokens_received() -> None:
    table = InFlight()
    resumed = replace(REQUEST, output_token_ids=(4,))
    entry = accepted(table, resumed)
    table.deliver([token(7), token(8)])
    assert table.lose_engine() == 1
    assert table.take(entry) == [replace(REQUEST, output_token_ids=(4, 7, 8))]
    assert table.take(entry) == []


def test_an_untouched_request_is_sent_again_as_it_came() -> None:
    table = InFlight()
    request = replace(REQUEST, n=3)
    entry = accepted(table, request)
    table.lose_engine()
    assert table.take(entry) == [request]


def test_each_unfinished_choice_is_replayed_on_its_own() -> None:
    table = InFlight()
    entry = accepted(table, replace(REQUEST, n=3))
    table.deliver([token(7), token(8, choice_index=2), token(9, choice_index=1, finish_reason=FinishReason.STOP)])
    table.lose_engine()
    assert table.take(entry) == [
        replace(REQUEST, output_token_ids=(7,)),
        replace(REQUEST, output_token_ids=(8,), choice_index=2),
    ]


def test_all_are_replayed_in_the_order_of_their_acceptance() -> None:
    table = InFlight()
    requests = [replace(REQUEST, request_id=i) for i in (5, 3, 4)]
    for request in requests:
        accepted(table, request)
    table.lose_engine()
    assert table.take_all() == requests


def test_the_prefix_hit_of_the_first_admission_is_the_one_that_is_told() -> None:
    table = InFlight()
    entry = accepted(table)
    table.deliver([token(7, num_cached_tokens=16)])
    table.lose_engine()
    table.take(entry)
    table.deliver([token(8, num_cached_tokens=0)])
    assert [update.num_cached_tokens for update in taken(entry)] == [16, 16]


def test_prompt_logprobs_are_told_once() -> None:
    table = InFlight()
    request = replace(REQUEST, sampling=SamplingParams(10, prompt_logprobs=0))
    entry = accepted(table, request)
    table.deliver([RequestUpdate(1, 0, prompt_logprobs=(None, LOGPROBS))])
    table.lose_engine()
    assert table.take(entry) == [request]
    table.deliver([RequestUpdate(1, 0, prompt_logprobs=(None,))])
    table.deliver([RequestUpdate(1, 0, (7,), prompt_logprobs=(LOGPROBS, LOGPROBS))])
    assert [update.prompt_logprobs for update in taken(entry)] == [(None, LOGPROBS), (), (LOGPROBS,)]
    table.lose_engine()
    assert table.take(entry) == [replace(REQUEST, output_token_ids=(7,))]  # all told: not asked for again


def test_a_choice_whose_abort_died_with_the_engine_ends_as_aborted() -> None:
    table = InFlight()
    entry = accepted(table)
    entry.choices[0].aborted = True
    table.lose_engine()
    assert taken(entry) == [RequestUpdate(1, 0, finish_reason=FinishReason.ABORT)]
    assert table.take_all() == []


def test_two_deaths_without_progress_make_a_suspect() -> None:
    table = InFlight()
    entry = accepted(table)
    for _ in range(2):
        assert table.suspects() == []
        table.blame([SeqId(1, 0)])
    assert table.suspects() == [(entry, entry.choices[0])]
    table.deliver([token(7)])
    assert table.suspects() == []


def test_an_abort_that_parks_a_choice_is_not_its_end() -> None:
    table = InFlight()
    entry = accepted(table)
    entry.choices[0].parking = True
    table.deliver([token(7), token(8, finish_reason=FinishReason.ABORT)])
    assert taken(entry) == [token(7), token(8)]
    assert table.take(entry) == [replace(REQUEST, output_token_ids=(7, 8))]


def test_a_client_may_abort_a_choice_that_is_being_parked() -> None:
    table = InFlight()
    entry = accepted(table)
    entry.choices[0].parking = entry.choices[0].aborted = True
    table.deliver([RequestUpdate(1, 0, finish_reason=FinishReason.ABORT)])
    assert entry.finished


def test_failing_all_ends_each_choice_with_one_error() -> None:
    table = InFlight()
    entry = accepted(table, replace(REQUEST, n=2))
    table.deliver([token(7, finish_reason=FinishReason.STOP)])
    assert table.fail_all("gone") == 1
    assert taken(entry)[1:] == [
        RequestUpdate(1, 1, finish_reason=FinishReason.ERROR, error="gone", error_kind=ErrorKind.UNAVAILABLE)
    ]


def test_a_dropped_request_hears_nothing_and_is_not_replayed() -> None:
    table = InFlight()
    entry = accepted(table)
    assert table.drop(entry)
    table.deliver([token(7)])
    assert (taken(entry), table.take_all(), table.drop(entry)) == ([], [], False)


async def test_a_waiting_consumer_wakes_for_news_and_for_the_end() -> None:
    table = InFlight()
    entry = accepted(table)
    waiter = asyncio.create_task(entry.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    table.deliver([token(7)])
    await waiter
    taken(entry)
    waiter = asyncio.create_task(entry.wait())
    await asyncio.sleep(0)
    table.finish(SeqId(1, 0), FinishReason.ABORT)
    await waiter


async def test_the_table_says_when_it_is_empty() -> None:
    table = InFlight()
    await table.wait_empty()
    entry = accepted(table)
    waiter = asyncio.create_task(table.wait_empty())
    await asyncio.sleep(0)
    assert not waiter.done()
    table.drop(entry)
    await waiter


def test_tokens_that_nobody_waits_for_are_counted() -> None:
    table = InFlight()
    entry = accepted(table, replace(REQUEST, n=2))
    table.deliver([token(7), token(8, finish_reason=FinishReason.LENGTH), token(9)])
    assert table.num_dropped_tokens == 1
    table.drop(entry)  # with two that were not taken
    assert table.num_dropped_tokens == 3
    table.deliver([token(3, choice_index=1)])
    assert table.num_dropped_tokens == 4
