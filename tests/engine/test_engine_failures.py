"""The engine dies, hangs, fails: what clients see is a pause, or one clear error."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.config import Fault, FaultKind
from engine.errors import EngineDead
from engine.recovery import RecoveryOptions
from engine.supervisor import EngineState
from engine.types import ErrorKind, FinishReason, SamplingParams

Start = Callable[..., Any]

POISON = 77


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP], ids=lambda s: s.name)
async def test_streams_survive_a_signal_with_the_same_tokens(
    start: Start, harness: Any, bench: Any, how: signal.Signals
) -> None:
    client = await start(step_seconds=0.005)
    requests = [harness.request(client, 30 + 10 * k, n=1 + k % 3) for k in range(8)]
    results = [asyncio.create_task(harness.tokens(client.submit(request))) for request in requests]
    await harness.until(lambda: client.stats() and client.stats().step_id >= 15)
    os.kill(client.engine_pid, how)
    expected = [bench().generate(request) for request in requests]
    assert await asyncio.gather(*results) == expected
    assert client.counters.restarts == 1
    assert client.counters.replayed_choices == sum(request.n for request in requests)


@pytest.mark.parametrize("kind", ["die", "hang", "raise"])
async def test_streams_survive_a_step_that_never_ends(start: Start, harness: Any, bench: Any, kind: FaultKind) -> None:
    client = await start(faults=(Fault(kind, step=10, lives=1),))
    requests = [harness.request(client, 40, n=2) for _ in range(4)]
    results = await asyncio.gather(*[harness.tokens(client.submit(request)) for request in requests])
    assert results == [bench().generate(request) for request in requests]
    assert client.counters.restarts == 1


async def test_a_stuck_engine_writes_down_where_it_is(
    start: Start, harness: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    client = await start(faults=(Fault("hang", step=2, lives=1),))
    await harness.tokens(client.submit(harness.request(client)))
    assert "in _fail" in capfd.readouterr().err


async def test_logprobs_go_on_where_they_stopped(start: Start, harness: Any, bench: Any) -> None:
    client = await start(faults=(Fault("die", step=5, lives=1),))
    sampling = SamplingParams(12, logprobs=2, prompt_logprobs=1)
    request = harness.request(client, sampling=sampling)
    updates = (await harness.collect(client.submit(request)))[0]
    tokens = [token for update in updates for token in update.new_token_ids]
    assert [tokens] == [list(choice) for choice in bench().generate(request)]
    assert [entry.token_id for update in updates for entry in update.logprobs] == tokens
    told = [entry and entry.token_id for update in updates for entry in update.prompt_logprobs]
    assert told == [None, *request.prompt_token_ids[1:]]


async def test_a_choice_that_has_ended_is_not_run_again(start: Start, harness: Any, bench: Any) -> None:
    client = await start(step_seconds=0.002)
    long = harness.request(client, 60, n=2)
    stream = client.submit(long)
    first = await anext(stream)
    client.abort(long.request_id, 0)
    updates = [*first]
    while not any(update.finish_reason for update in updates):
        updates += await anext(stream)
    os.kill(client.engine_pid, signal.SIGKILL)
    updates += [update async for batch in stream for update in batch]
    ends = [(update.choice_index, update.finish_reason) for update in updates if update.finish_reason]
    assert ends == [(0, FinishReason.ABORT), (1, FinishReason.LENGTH)]
    assert client.counters.replayed_choices == 1


async def test_while_the_engine_is_away_requests_are_taken_and_aborts_are_carried_out(
    start: Start, harness: Any, bench: Any
) -> None:
    client = await start(load_seconds=0.1, step_seconds=0.002)
    lost = client.submit(harness.request(client, 5000))
    await anext(lost)
    os.kill(client.engine_pid, signal.SIGKILL)
    await harness.until(lambda: client.status.state is not EngineState.READY)
    assert (client.status.state, client.status.ready) == (EngineState.RESTARTING, False)
    assert client.status.reason
    late = harness.request(client, 30)
    late_stream = client.submit(late)
    client.abort(lost.request.request_id)
    updates = [update async for batch in lost for update in batch]
    assert updates[-1].finish_reason is FinishReason.ABORT
    assert client.status.state is EngineState.RESTARTING  # the abort did not wait for the new engine
    assert await harness.tokens(late_stream) == bench().generate(late)
    assert client.status.ready


async def test_a_consumer_that_leaves_while_the_engine_is_away_is_forgotten(start: Start, harness: Any) -> None:
    client = await start(load_seconds=0.1, step_seconds=0.002)
    stream = client.submit(harness.request(client, 5000))
    await anext(stream)
    os.kill(client.engine_pid, signal.SIGKILL)
    await harness.until(lambda: client.status.state is EngineState.RESTARTING)
    await stream.aclose()
    assert client.num_in_flight == 0
    await harness.until(lambda: client.status.ready)
    await harness.tokens(client.submit(harness.request(client, 3)))
    assert client.stats().num_running == 0


async def test_an_engine_killed_while_it_loads_again_is_started_again(start: Start, harness: Any, bench: Any) -> None:
    client = await start(load_seconds=0.2, step_seconds=0.002)
    request = harness.request(client, 50)
    result = asyncio.create_task(harness.tokens(client.submit(request)))
    await harness.until(lambda: client.stats() is not None)
    for _ in range(2):
        pid = client.engine_pid
        os.kill(pid, signal.SIGKILL)
        await harness.until(lambda pid=pid: client.engine_pid not in (pid, None))
    assert await result == bench().generate(request)
    assert client.counters.restarts == 2


async def test_a_request_that_kills_every_engine_ends_with_an_error_and_the_others_go_on(
    start: Start, harness: Any, bench: Any
) -> None:
    client = await start(faults=(Fault("raise", token_id=POISON),))
    bystanders = [harness.request(client, 40, n=2) for _ in range(3)]
    results = [asyncio.create_task(harness.tokens(client.submit(request))) for request in bystanders]
    poison = client.submit(harness.request(client, prompt_token_ids=(1, POISON)))
    [[last]] = (await harness.collect(poison)).values()
    assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, ErrorKind.INTERNAL)
    assert "scripted failure" in last.error
    assert await asyncio.gather(*results) == [bench().generate(request) for request in bystanders]
    assert client.counters.restarts == 3  # twice with others, once alone
    assert client.counters.failed_choices == 1


async def test_a_sequence_that_fails_ends_alone(start: Start, harness: Any, bench: Any) -> None:
    client = await start(faults=(Fault("error", token_id=POISON),))
    good = harness.request(client)
    streams = [client.submit(harness.request(client, prompt_token_ids=(POISON,))), client.submit(good)]
    [[bad]] = (await harness.collect(streams[0])).values()
    assert (bad.finish_reason, bad.error_kind) == (FinishReason.ERROR, ErrorKind.INTERNAL)
    assert await harness.tokens(streams[1]) == bench().generate(good)
    assert client.counters.restarts == 0


async def test_kills_from_outside_never_end_a_stream(start: Start, harness: Any, bench: Any) -> None:
    client = await start(step_seconds=0.05)
    request = harness.request(client, 12)
    result = asyncio.create_task(harness.tokens(client.submit(request)))
    for life in range(1, 4):  # each before the first step of its life has ended
        await harness.until(lambda life=life: client.status.ready and client.counters.restarts == life - 1)
        os.kill(client.engine_pid, signal.SIGKILL)
        await harness.until(lambda life=life: client.counters.restarts == life)
    assert await result == bench().generate(request)


async def test_the_circuit_opens_and_heals(monkeypatch: pytest.MonkeyPatch, start: Start, harness: Any) -> None:
    """It stays open for ten minutes, which pass at once when all has been looked at: no haste, however busy the
    machine is."""
    recovery = RecoveryOptions(first_delay_seconds=0.01, max_deaths=2, open_seconds=600)
    client = await start(replace(harness.quick, recovery=recovery), faults=(Fault("raise", step=1, lives=2),))
    streams = [client.submit(harness.request(client, n=2)) for _ in range(2)]
    for stream in streams:
        for [update] in (await harness.collect(stream)).values():
            assert (update.finish_reason, update.error_kind) == (FinishReason.ERROR, ErrorKind.UNAVAILABLE)
    assert client.status.state is EngineState.BROKEN
    assert 0 < client.status.retry_after_seconds <= 600
    assert client.counters.failed_choices == 4
    with pytest.raises(EngineDead, match="scripted failure"):
        client.submit(harness.request(client))
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 600)
    await harness.until(lambda: client.status.ready)
    assert [len(tokens) for tokens in await harness.tokens(client.submit(harness.request(client, 7)))] == [7]


@pytest.mark.parametrize("seed", [1, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20)]])
async def test_every_accepted_choice_ends_exactly_once(start: Start, harness: Any, bench: Any, seed: int) -> None:
    """Random submits, aborts, departures, crashes and kills; seeds fix the plan, not the timing."""
    rng = random.Random(seed)
    client = await start(
        step_seconds=0.002,
        faults=(Fault("raise", step=40, lives=1), Fault("hang", step=60, lives=2), Fault("error", token_id=POISON)),
    )
    expected = bench()

    async def one(k: int) -> None:
        await asyncio.sleep(3 * rng.random())
        poisoned = rng.random() < 0.1
        prompt = tuple(rng.choices(range(POISON), k=rng.randint(1, 60))) + (POISON,) * poisoned
        request = harness.request(client, rng.randint(1, 60), n=rng.randint(1, 3), prompt_token_ids=prompt)
        stream = client.submit(request)
        fate = rng.choice(["stay", "stay", "stay", "abort", "abort one", "leave"])
        if fate == "leave":
            await stream.wait(rng.random() / 10)
            await stream.aclose()
            return
        if fate != "stay":
            await stream.wait(rng.random() / 10)
            client.abort(request.request_id, 0 if fate == "abort one" else None)
        updates = await harness.collect(stream)  # checks the one terminal update of each choice
        whole: list[tuple[int, ...]] = [] if poisoned else expected.generate(request)
        for index, choice in updates.items():
            reason = choice[-1].finish_reason
            if poisoned:
                assert reason in (FinishReason.ERROR, FinishReason.ABORT)
                continue
            tokens = sum((update.new_token_ids for update in choice), ())
            assert reason is not FinishReason.ERROR
            assert tokens == whole[index][: len(tokens)]
            assert reason is FinishReason.ABORT or len(tokens) == request.sampling.max_tokens

    async def killer() -> None:
        for _ in range(4):
            await asyncio.sleep(0.3 + rng.random())
            if client.engine_pid is not None:
                stop = client.status.ready and rng.random() < 0.5  # while loading it would take long to be noticed
                os.kill(client.engine_pid, signal.SIGSTOP if stop else signal.SIGKILL)

    async with asyncio.timeout(60):
        await asyncio.gather(killer(), *[one(k) for k in range(120)])
    await harness.until(lambda: client.num_in_flight == 0 and client.status.ready)
    await harness.tokens(client.submit(harness.request(client, 3)))
    assert client.counters.restarts >= 2
    assert (client.stats().num_running, client.stats().num_waiting) == (0, 0)
    [kv] = client.stats().kv_groups
    assert kv.free + kv.cached == client.info.num_kv_blocks[0]
