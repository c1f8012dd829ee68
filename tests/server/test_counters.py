"""After each scenario the counters equal what a client has counted, to the token."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from typing import Any

from engine.config import FakeOptions, Fault
from tests.server.fake_engine import FakeServed, fake_served

ABC = FakeOptions(vocab_size=259, rule="script", script=tuple(b"abcdefgh"))
SLOW_ABC = FakeOptions(vocab_size=259, rule="script", script=tuple(b"abcdefgh"), step_seconds=0.005)
NOTHING_ELSE = {
    "octavo_discarded_tokens_total": 0.0,
    "octavo_overrun_tokens_total": 0.0,
    "octavo_preemptions_total{kind=recompute}": 0.0,
    "octavo_engine_restarts_total": 0.0,
    "octavo_failed_choices_total": 0.0,
}


def check(found: dict[str, float], **expected: float) -> None:
    """Keys: `name` or `name__label` of octavo_NAME_total{…=label}."""
    labels = {"requests_finished": "reason", "aborts": "cause", "refusals": "reason", "preemptions": "kind"}
    for key, value in expected.items():
        name, _, label = key.partition("__")
        series = f"octavo_{name}_total" + (f"{{{labels[name]}={label}}}" if label else "")
        assert found[series] == value, series


def choice_tokens(events: str) -> int:
    """Tokens that a stream of /generate has brought."""
    data = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return sum(event.get("token_id") is not None for event in data)


async def usage(served: FakeServed, **body: Any) -> dict[str, Any]:
    response = await served.post("/v1/completions", **body)
    assert response.status_code == 200, response.text
    return dict(response.json()["usage"])


async def test_answers_that_end_by_themselves() -> None:
    async with fake_served(ABC) as served:
        bodies: list[dict[str, Any]] = [
            {"prompt": "a" * 40, "max_tokens": 7},
            {"prompt": "b" * 21, "max_tokens": 5, "n": 3},
            {"prompt": ["x", "yy"], "max_tokens": 2},
        ]
        counted = [await usage(served, **body) for body in bodies]
        counted.append(await usage(served, prompt="a" * 40, max_tokens=7))  # its prefix is cached now
        found = await served.metrics()
    generated = sum(each["completion_tokens"] for each in counted)
    assert generated == 7 + 15 + 4 + 7
    cached = sum(each.get("prompt_tokens_details", {}).get("cached_tokens", 0) for each in counted)
    assert cached == 32
    check(
        found,
        generation_tokens=generated,
        prompt_tokens=sum(each["prompt_tokens"] for each in counted),
        cached_prompt_tokens=cached,
        prefix_hit_tokens=cached,
        requests_finished__length=7,
        requests_finished__abort=0,
    )
    assert found.items() >= NOTHING_ELSE.items()
    assert found["octavo_time_to_first_token_seconds_count"] == 4
    assert found["octavo_request_queue_seconds_count"] == found["octavo_request_decode_seconds_count"] == 5  # prompts
    assert found["octavo_inter_token_seconds_count"] == generated - 7
    assert found["octavo_computed_tokens_total{kind=decode}"] == generated - 7
    steps = found["octavo_engine_steps_total"]
    assert steps > 0
    assert found["octavo_step_phase_seconds_count{phase=forward}"] == found["octavo_step_tokens_count"] == steps
    computed = found["octavo_computed_tokens_total{kind=prefill}"] + found["octavo_computed_tokens_total{kind=decode}"]
    assert found["octavo_step_tokens_sum"] == computed


async def test_what_a_stop_string_cuts_off_is_counted_apart() -> None:
    """What the engine sampled behind the stop is discarded here or overrun there, never delivered."""
    async with fake_served(SLOW_ABC) as served:
        counted = await usage(served, prompt="p", max_tokens=100, stop="e")
        await served.until(lambda: (stats := served.engine.stats()) is not None and stats.num_running == 0)
        found = await served.metrics()
    assert counted["completion_tokens"] == 5
    check(found, generation_tokens=5, requests_finished__stop=1)
    aborts = [found[f"octavo_aborts_total{{cause={cause}}}"] for cause in ("disconnect", "request", "deadline")]
    assert aborts == [0, 0, 0]
    sampled = found["octavo_computed_tokens_total{kind=decode}"] + 1  # the first comes with the prompt
    assert sampled == 5 + found["octavo_discarded_tokens_total"] + found["octavo_overrun_tokens_total"]


async def test_each_sampled_token_is_delivered_discarded_or_overrun() -> None:
    """However an answer ends: by an abort, with its client, at a stop string among others."""
    async with fake_served(replace(SLOW_ABC, step_seconds=0.001)) as served:
        body = {"prompt": ["p", "q"], "max_tokens": 200, "n": 2}
        headers = {"x-request-id": "mine"}
        aborted = asyncio.create_task(served.http.post("/v1/completions", json=body, headers=headers))
        left = asyncio.create_task(served.http.post("/v1/completions", json=body | {"stream": True}))
        await served.until(lambda: (stats := served.engine.stats()) is not None and stats.num_decode_tokens == 8)
        stopped = asyncio.create_task(served.http.post("/v1/completions", json=body | {"stop": "abcdefgha"}))
        assert (await served.post("/abort", request_id="mine")).status_code == 200
        left.cancel()
        await asyncio.gather(aborted, left, stopped, return_exceptions=True)
        await served.until(lambda: (stats := served.engine.stats()) is not None and stats.num_running == 0)
        found = await served.metrics()
    check(found, requests_finished__stop=4, requests_finished__abort=8, aborts__request=4, aborts__disconnect=4)
    sampled = found["octavo_computed_tokens_total{kind=decode}"] + 12  # first tokens come with their prompts
    kinds = [found[f"octavo_{kind}_tokens_total"] for kind in ("generation", "discarded", "overrun")]
    assert sampled == sum(kinds)


async def test_an_abort_by_request() -> None:
    async with fake_served(SLOW_ABC) as served:
        headers = {"x-request-id": "mine"}
        body = {"prompt": "p", "max_tokens": 200}
        stream = asyncio.create_task(served.http.post("/generate/stream", json=body, headers=headers))
        await served.until(lambda: (stats := served.engine.stats()) is not None and stats.step_id > 5)
        assert (await served.post("/abort", request_id="mine")).status_code == 200
        events = (await stream).text
        await served.until(lambda: served.engine.num_in_flight == 0)
        found = await served.metrics()
    assert choice_tokens(events) > 0
    check(found, generation_tokens=choice_tokens(events), requests_finished__abort=1, aborts__request=1)
    assert found["octavo_aborts_total{cause=disconnect}"] == 0


async def test_a_deadline() -> None:
    async with fake_served(SLOW_ABC) as served:
        events = (await served.post("/generate/stream", prompt="p", max_tokens=200, timeout=0.2)).text
        found = await served.metrics()
    check(found, generation_tokens=choice_tokens(events), requests_finished__timeout=1, aborts__deadline=1)


async def test_refusals_by_their_reasons() -> None:
    settings: dict[str, Any] = {"api_key": ("ann=a", "bob=b"), "requests_per_minute": 2, "max_body_bytes": 1024}
    async with fake_served(ABC, **settings) as served:
        served.http.headers["authorization"] = "Bearer a"
        statuses = [
            (await served.post("/v1/completions", **body)).status_code
            for body in (
                {"prompt": "x", "max_tokens": 1},
                {"prompt": "x", "temperature": -1},
                {"prompt": "x", "model": "other"},
                {"prompt": "x" * 300, "max_tokens": 1},
                {"prompt": "x", "max_tokens": 1},
                {"prompt": "x" * 2000},
            )
        ]
        plain = await served.http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        nobody = await served.http.post("/v1/completions", json={}, headers={"authorization": "Bearer c"})
        served.http.headers["authorization"] = "Bearer b"
        draining = served.server
        draining.draining = True
        late = await served.post("/v1/completions", prompt="x")
        found = await served.metrics()
    assert statuses == [200, 400, 404, 400, 429, 413]
    assert [r.status_code for r in (plain, nobody, late)] == [415, 401, 503]
    reasons = {
        "invalid": 1,
        "unknown_model": 1,
        "context_length": 1,
        "requests_per_minute": 1,
        "body_too_large": 1,
        "media_type": 1,
        "unauthorized": 1,
        "not_ready": 1,
    }
    check(found, generation_tokens=1, **{f"refusals__{reason}": count for reason, count in reasons.items()})
    refused = sum(value for name, value in found.items() if name.startswith("octavo_refusals_total{"))
    assert refused == sum(reasons.values())


async def test_an_error_of_one_request_in_the_engine() -> None:
    faulty = FakeOptions(vocab_size=259, rule="script", script=(97,), faults=(Fault("error", token_id=ord("!")),))
    async with fake_served(faulty) as served:
        failed, fine = await asyncio.gather(
            served.post("/v1/completions", prompt="!", max_tokens=3),
            served.post("/v1/completions", prompt="?", max_tokens=3),
        )
        found = await served.metrics()
    assert (failed.status_code, fine.status_code) == (500, 200)
    check(found, generation_tokens=3, requests_finished__error=1, requests_finished__length=1, aborts__disconnect=0)
    assert sum(value for name, value in found.items() if name.startswith("octavo_refusals_total{")) == 0


async def test_preemptions_lose_no_token_and_are_counted() -> None:
    small = replace(SLOW_ABC, kv_cache_tokens=160)  # slow enough for all four to meet
    async with fake_served(small) as served:
        counted = await asyncio.gather(*[usage(served, prompt=f"{k}" * 30, max_tokens=60) for k in range(4)])
        stats = served.engine.stats()
        found = await served.metrics()
        health = (await served.http.get("/health")).json()
    assert (health["ready"], health["running"], health["waiting"], health["engine_restarts"]) == (True, 0, 0, 0)
    assert health["uptime_seconds"] > 0
    assert health["memory"]["server_bytes"] > health["memory"]["engine_bytes"] > 1 << 20
    assert health["memory"]["kv_usage_ratio"] == 0
    assert [each["completion_tokens"] for each in counted] == [60] * 4
    assert stats is not None
    assert stats.preemptions_total > 0
    check(found, generation_tokens=240, requests_finished__length=4, preempted_tokens=stats.preempted_tokens_total)
    kinds = [found[f"octavo_preemptions_total{{kind={kind}}}"] for kind in ("recompute", "swap")]
    assert sum(kinds) == stats.preemptions_total
    states = [found[f"octavo_kv_blocks{{group=0,state={state}}}"] for state in ("free", "private", "shared", "cached")]
    assert sum(states) == 160 / 16


async def test_swapped_sequences_come_back_and_are_counted() -> None:
    small = replace(SLOW_ABC, kv_cache_tokens=160, host_kv_cache_tokens=320)
    async with fake_served(small, engine={"preemption": "swap"}) as served:
        counted = await asyncio.gather(*[usage(served, prompt=f"{k}" * 30, max_tokens=60) for k in range(4)])
        stats, found = served.engine.stats(), await served.metrics()
    assert stats is not None
    assert stats.parked_total > 0
    check(found, generation_tokens=sum(each["completion_tokens"] for each in counted), requests_finished__length=4)
    check(found, preemptions__swap=stats.parked_total)
    assert found["octavo_swapped_blocks_total{direction=out}"] == stats.swapped_out_blocks_total > 0
    assert found["octavo_swapped_blocks_total{direction=in}"] == stats.swapped_in_blocks_total > 0
    states = [found[f"octavo_host_kv_blocks{{group=0,state={s}}}"] for s in ("free", "private", "shared", "cached")]
    assert sum(states) == 320 / 16
    assert states[1] == states[2] == 0  # nothing waits to come back


async def test_a_restart_of_the_engine_loses_no_token_and_no_count() -> None:
    async with fake_served(SLOW_ABC) as served:
        first = await usage(served, prompt="p", max_tokens=10)
        running = [asyncio.create_task(usage(served, prompt=f"{k}", max_tokens=200)) for k in range(3)]
        await served.until(lambda: (stats := served.engine.stats()) is not None and stats.step_id > 20)
        before = await served.metrics()
        assert served.engine.engine_pid is not None
        os.kill(served.engine.engine_pid, signal.SIGKILL)
        counted = [first, *await asyncio.gather(*running)]
        found = await served.metrics()
    generated = sum(each["completion_tokens"] for each in counted)
    assert generated == 610
    check(found, generation_tokens=generated, engine_restarts=1, replayed_choices=3, failed_choices=0)
    check(found, requests_finished__length=4)
    assert found["octavo_engine_steps_total"] > before["octavo_engine_steps_total"] > 20  # goes on, not back to 0
    steps = found["octavo_step_phase_seconds_count{phase=forward}"]
    assert found["octavo_engine_steps_total"] >= steps


async def test_random_paths_models_and_users_make_fewer_than_twenty_series() -> None:
    async with fake_served(ABC) as served:
        before = set(await served.metrics())
        for number in range(5000):
            await served.http.get(f"/{number:x}/{number * 7919 % 104729}")
            if number % 10 == 0:
                await served.post("/v1/completions", prompt="x", model=f"m{number}", max_tokens=1)
                await served.post("/v1/completions", prompt="x", user=f"u{number}", max_tokens=1)
        after = await served.metrics()
    assert len(set(after) - before) < 20, sorted(set(after) - before)
