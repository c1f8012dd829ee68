"""Limits before work: queue, requests and tokens a minute, requests at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.admission import Admission, Bucket
from server.errors import QueueFull, RateLimited
from server.settings import Settings
from tests.server.toy import ToyEngine, saying, toy_server


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock, num_waiting: int = 0, **settings: Any) -> tuple[Admission, list[str]]:
    refusals: list[str] = []
    return Admission(Settings(**settings), lambda: num_waiting, refusals.append, clock), refusals


def test_a_bucket_refills_evenly_and_never_overflows() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert (bucket.remaining(), bucket.seconds_until(1)) == (0, 1.0)
    clock.now += 2.5
    assert bucket.remaining() == 2
    clock.now += 1000
    assert bucket.remaining() == 60


def test_requests_a_minute_are_counted_by_key() -> None:
    clock = Clock()
    door, refusals = admission(clock, requests_per_minute=2)
    for _ in range(2):
        with door.enter("a", 1):
            pass
    with pytest.raises(RateLimited) as refused, door.enter("a", 1):
        pass
    assert refused.value.retry_after_seconds == 30
    with door.enter("b", 1):
        pass
    clock.now += 30
    with door.enter("a", 1):
        pass
    assert refusals == ["requests_per_minute"]


def test_tokens_may_leave_a_debt_that_has_to_be_waited_off() -> None:
    clock = Clock()
    door, refusals = admission(clock, tokens_per_minute=60)
    with door.enter("a", 1):
        door.charge_tokens("a", 90)
    with pytest.raises(RateLimited) as refused, door.enter("a", 1):
        pass
    assert refused.value.retry_after_seconds == 31
    clock.now += 31
    with door.enter("a", 1):
        pass
    assert refusals == ["tokens_per_minute"]


def test_requests_at_once_are_bounded_by_key() -> None:
    door, refusals = admission(Clock(), max_streams_per_key=1)
    with door.enter("a", 1):
        with pytest.raises(RateLimited), door.enter("a", 1):
            pass
        with door.enter("b", 1):
            assert door.num_active == 2
    with door.enter("a", 1):
        pass
    assert refusals == ["concurrency"]


def test_the_queue_is_bounded_by_what_the_engine_says_and_by_our_own_count() -> None:
    door, refusals = admission(Clock(), num_waiting=3, max_queued_requests=3)
    with pytest.raises(QueueFull), door.enter("a", 1):
        pass
    door, _ = admission(Clock(), max_queued_requests=3, max_num_seqs=4)
    with door.enter("a", 6), door.enter("b", 1), pytest.raises(QueueFull), door.enter("c", 1):
        pass
    assert refusals == ["queue_full"]


async def test_idle_is_when_nothing_is_in_progress() -> None:
    door, _ = admission(Clock())
    await door.wait_idle()
    with door.enter("a", 1):
        waiting = asyncio.create_task(door.wait_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_limits_show_in_the_headers_of_answers_and_refusals() -> None:
    async with toy_server(ToyEngine(saying("Hello")), requests_per_minute=2, tokens_per_minute=1000) as toy:
        first = await toy.post("/v1/completions", prompt="ab")
        await toy.post("/v1/completions", prompt="ab", stream=True)
        refused = await toy.post("/v1/completions", prompt="ab")
        assert (await toy.http.get("/health")).status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-tokens"] == str(1000 - 8)
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_full_queue_is_429_and_leaves_room_again() -> None:
    hold, both = asyncio.Event(), asyncio.Barrier(3)

    async def gate(step: int) -> None:
        if step == 0 and not hold.is_set():
            await both.wait()
        await hold.wait()

    engine = ToyEngine(saying("Hello"), gate=gate)
    async with toy_server(engine, max_queued_requests=1, max_num_seqs=1) as toy:
        running = [asyncio.create_task(toy.post("/v1/completions", prompt="ab")) for _ in range(2)]
        await both.wait()
        refused = await toy.post("/v1/completions", prompt="ab")
        hold.set()
        answers = await asyncio.gather(*running)
        assert (await toy.post("/v1/completions", prompt="ab")).status_code == 200
    assert refused.status_code == 429
    assert refused.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }
    assert [answer.status_code for answer in answers] == [200, 200]
