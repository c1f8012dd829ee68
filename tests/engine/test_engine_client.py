"""Server and engine as two processes: requests, aborts, drains, lifetimes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from engine.client import EngineClient
from engine.config import EngineConfig, Fault
from engine.core.plan import SeqId
from engine.errors import EngineDead, EngineDraining, EngineUnavailable, ModelError
from engine.supervisor import EngineState
from engine.types import ErrorKind, FinishReason, LoadProgress, RequestUpdate, SamplingParams, StepStats
from engine.wire import StepBegun

Start = Callable[..., Any]


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead but that nobody has reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_the_tokens_are_those_of_the_engine_without_a_process(start: Start, harness: Any, bench: Any) -> None:
    client = await start()
    request = harness.request(client, 50, n=3)
    assert await harness.tokens(client.submit(request)) == bench().generate(request)


async def test_what_the_engine_says_of_itself(start: Start) -> None:
    client = await start(vocab_size=100, context_length=64)
    assert (client.info.vocab_size, client.info.max_model_len, client.info.architecture) == (100, 64, "fake")
    assert client.status.ready
    assert client.status.progress == LoadProgress("pretending to read weights", 0.75)
    assert client.stats() is None


async def test_a_request_without_tokens_to_generate_ends_too(start: Start, harness: Any) -> None:
    client = await start()
    request = harness.request(client, sampling=SamplingParams(0, prompt_logprobs=1), n=2)
    updates = await harness.collect(client.submit(request))
    assert [u.finish_reason for u in updates[0] + updates[1]] == [FinishReason.LENGTH] * 2
    assert len(updates[0][0].prompt_logprobs) == len(request.prompt_token_ids)


async def test_a_request_that_can_never_run_is_refused_by_an_update(start: Start, harness: Any) -> None:
    client = await start(context_length=16)
    updates = await harness.collect(client.submit(harness.request(client, n=2)))
    for [update] in updates.values():
        assert (update.finish_reason, update.error_kind) == (FinishReason.ERROR, ErrorKind.REJECTED)


async def test_many_streams_at_once_all_end(start: Start, harness: Any, bench: Any) -> None:
    client = await start()
    requests = [harness.request(client, 10 + k % 50, n=1 + (k % 8 == 0)) for k in range(128)]
    results = await asyncio.gather(*[harness.tokens(client.submit(request)) for request in requests])
    expected = bench()
    assert results == [expected.generate(request) for request in requests]
    await harness.until(lambda: client.stats().num_running == client.stats().num_waiting == 0)
    [kv] = client.stats().kv_groups
    assert (kv.private, kv.shared, kv.free + kv.cached) == (0, 0, client.info.num_kv_blocks[0])


async def test_an_abort_ends_a_request_within_a_step(start: Start, harness: Any) -> None:
    client = await start(step_seconds=0.2)
    stream = client.submit(harness.request(client, 1000))
    await anext(stream)
    client.abort(stream.request.request_id)
    num_steps = client.stats().step_id
    rest = [update async for batch in stream for update in batch]
    assert rest[-1].finish_reason is FinishReason.ABORT
    assert client.stats().step_id - num_steps <= 1


async def test_one_choice_is_aborted_and_the_other_goes_on(start: Start, harness: Any, bench: Any) -> None:
    client = await start(step_seconds=0.002)
    request = harness.request(client, 60, n=2)
    stream = client.submit(request)
    await anext(stream)
    client.abort(request.request_id, 1)
    updates = [update async for batch in stream for update in batch]
    ends = {update.choice_index: update.finish_reason for update in updates if update.finish_reason}
    assert ends == {0: FinishReason.LENGTH, 1: FinishReason.ABORT}


@pytest.mark.parametrize("leave", ["aclose", "with", "break", "cancel"])
async def test_a_consumer_that_leaves_aborts_its_request(start: Start, harness: Any, leave: str) -> None:
    client = await start(step_seconds=0.002)

    async def consume() -> None:
        stream = client.submit(harness.request(client, 5000))
        if leave == "with":
            async with stream:
                await anext(stream)
            return
        async for _ in stream:
            if leave == "aclose":
                await stream.aclose()
                return
            if leave == "break":
                break

    task = asyncio.create_task(consume())
    if leave == "cancel":
        await harness.until(lambda: client.stats() and client.stats().num_running == 1)
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    gc.collect()
    await harness.until(lambda: client.stats().num_running == 0)
    [kv] = client.stats().kv_groups
    assert kv.free + kv.cached == client.info.num_kv_blocks[0]
    assert client.num_in_flight == 0


async def test_waiting_with_a_time_limit_takes_and_aborts_nothing(start: Start, harness: Any) -> None:
    client = await start(step_seconds=0.3)
    stream = client.submit(harness.request(client, 2))
    assert not await stream.wait(0.01)
    assert await stream.wait(10)
    assert len((await harness.tokens(stream))[0]) == 2
    assert await stream.wait(0)
    assert stream.finished


async def test_a_slow_consumer_holds_nobody_up(start: Start, harness: Any) -> None:
    client = await start()
    slow = client.submit(harness.request(client, 300))
    await harness.tokens(client.submit(harness.request(client, 300)))
    await harness.until(lambda: client.num_in_flight == 0)
    assert [len(tokens) for tokens in await harness.tokens(slow)] == [300]


async def test_listeners_hear_every_step_and_cannot_break_the_delivery(start: Start, harness: Any) -> None:
    client = await start()
    heard: list[tuple[StepStats, StepBegun]] = []

    def broken(stats: StepStats, begun: StepBegun) -> None:
        raise RuntimeError("monitoring has a bug")

    def listener(stats: StepStats, begun: StepBegun) -> None:
        heard.append((stats, begun))

    client.add_step_listener(broken)
    client.add_step_listener(listener)
    stream = client.submit(harness.request(client, 10))
    await harness.tokens(stream)
    assert [stats.step_id for stats, _ in heard] == [begun.step_id for _, begun in heard] == list(range(1, 11))
    assert [begun.seq_ids for _, begun in heard] == [(SeqId(stream.request.request_id, 0),)] * 10
    assert [begun.num_tokens for _, begun in heard] == [(19,)] + [(1,)] * 9
    assert client.stats() is heard[-1][0]
    client.remove_step_listener(listener)
    await harness.tokens(client.submit(harness.request(client, 1)))
    assert len(heard) == 10


async def test_the_wait_of_the_oldest_is_measured_until_an_engine_runs_it(start: Start, harness: Any) -> None:
    client = await start()
    assert client.longest_wait_seconds() == 0.0
    before = time.monotonic()
    stream = client.submit(harness.request(client, 1))
    assert stream.begun_at is None
    assert 0.0 < client.longest_wait_seconds() <= time.monotonic() - before
    await harness.tokens(stream)
    assert stream.begun_at is not None
    assert before < stream.begun_at < time.monotonic()
    assert client.longest_wait_seconds() == 0.0


async def test_nothing_is_taken_while_the_model_loads(harness: Any) -> None:
    client = EngineClient(harness.config(load_seconds=0.2))
    await client.start()
    assert (client.status.state, client.status.ready, client.info) == (EngineState.STARTING, False, None)
    with pytest.raises(EngineUnavailable, match="loading"):
        client.submit(harness.request(client))
    await client.wait_ready()
    await client.close()


async def test_a_failed_start_is_told_and_not_repeated(harness: Any) -> None:
    client = EngineClient(harness.config(faults=(Fault("raise", step=0),)))
    await client.start()
    with pytest.raises(EngineDead, match="scripted failure"):
        await client.wait_ready()
    assert client.status.state is EngineState.STOPPED
    assert client.counters.restarts == 0
    with pytest.raises(EngineDead):
        client.submit(harness.request(client))
    await client.close()


async def test_a_model_that_cannot_be_served_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nothing")
    client = EngineClient(EngineConfig(str(tmp_path / "broken.gguf"), kernels="torch"))
    await client.start()
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        await client.wait_ready()
    await client.close()


async def test_a_start_can_be_given_up(harness: Any) -> None:
    client = EngineClient(harness.config(load_seconds=60))
    await client.start()
    await harness.until(lambda: client.engine_pid)
    pid = client.engine_pid
    assert pid is not None
    begun = time.monotonic()
    await client.close()
    assert time.monotonic() - begun < 5
    assert not alive(pid)
    with pytest.raises(EngineDead):
        await client.wait_ready()


async def test_draining_finishes_what_runs_and_takes_nothing_new(start: Start, harness: Any) -> None:
    client = await start(step_seconds=0.005)
    result = asyncio.create_task(harness.tokens(client.submit(harness.request(client, 40))))
    drained = asyncio.create_task(client.drain(10))
    await asyncio.sleep(0)
    assert not client.status.ready
    with pytest.raises(EngineDraining):
        client.submit(harness.request(client))
    assert await drained
    assert [len(tokens) for tokens in await result] == [40]


async def test_a_drain_that_takes_too_long_gives_up_and_close_ends_the_rest(start: Start, harness: Any) -> None:
    client = await start(step_seconds=0.01)
    result = asyncio.create_task(harness.collect(client.submit(harness.request(client, 5000))))
    assert not await client.drain(0.05)
    pid = client.engine_pid
    await client.close()
    assert not alive(pid)
    last = (await result)[0][-1]
    assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, ErrorKind.UNAVAILABLE)
    assert client.status.state is EngineState.STOPPED


async def test_two_engines_live_side_by_side(start: Start, harness: Any, bench: Any) -> None:
    first, second = await start(), await start(vocab_size=50)
    assert first.engine_pid != second.engine_pid
    requests = [harness.request(client, 100) for client in (first, second)]
    results = await asyncio.gather(
        *[harness.tokens(c.submit(r)) for c, r in zip((first, second), requests, strict=True)]
    )
    assert results == [bench().generate(requests[0]), bench(vocab_size=50).generate(requests[1])]


def test_uvloop_serves_as_well(harness: Any, bench: Any) -> None:
    async def serve() -> tuple[Any, Any]:
        client = EngineClient(harness.config())
        await client.start()
        await client.wait_ready()
        request = harness.request(client, 30, n=2)
        tokens = await harness.tokens(client.submit(request))
        await client.close()
        return tokens, bench().generate(request)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        tokens, expected = runner.run(serve())
    assert tokens == expected


async def test_signals_to_the_whole_group_are_left_to_the_server(start: Start, harness: Any) -> None:
    client = await start(step_seconds=0.002)
    stream = client.submit(harness.request(client, 50))
    await anext(stream)
    os.kill(client.engine_pid, signal.SIGINT)
    os.kill(client.engine_pid, signal.SIGTERM)
    assert len([u async for batch in stream for u in batch]) == 49
    assert client.counters.restarts == 0


async def test_the_prefix_cache_can_be_reset(start: Start, harness: Any) -> None:
    client = await start()
    request = harness.request(client, 5, prompt_token_ids=tuple(range(100)))

    async def cached_tokens() -> int:
        again = replace(request, request_id=client.new_request_id())
        first: RequestUpdate = (await harness.collect(client.submit(again)))[0][0]
        return first.num_cached_tokens

    assert [await cached_tokens(), await cached_tokens()] == [0, 96]
    client.reset_prefix_cache()
    assert await cached_tokens() == 0


SERVER = """
import asyncio
from engine.client import EngineClient
from engine.config import EngineConfig, FakeOptions

async def main():
    client = EngineClient(EngineConfig("", executor="fake", fake=FakeOptions(step_seconds=30)))
    await client.start()
    await client.wait_ready()
    print(client.engine_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_the_engine_does_not_outlive_its_server(harness: Any) -> None:
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    pid = int(await server.stdout.readline())
    assert alive(pid)
    server.kill()
    await server.communicate()
    await harness.until(lambda: not alive(pid))
