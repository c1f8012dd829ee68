"""Profiles: what the engine did, step by step, for Perfetto; and the times of operations."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.client import EngineClient
from engine.core.plan import StepTimes, TimedSpan
from engine.errors import ProfileRefused
from engine.profile import Profile
from engine.types import GenerationRequest, SamplingParams
from engine.wire import Profiled, StartProfile, StepDone, StopProfile, Submit
from tests.engine.test_engine_loop import REQUEST, MakeBench
from tests.monitoring.test_metrics import STEP

Start = Callable[..., Awaitable[EngineClient]]


def slices(trace: bytes, name: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X" and event["name"] == name]


def test_a_step_becomes_slices_that_lie_within_one_another() -> None:
    profile = Profile(5)
    times = StepTimes(10.0, 10.5, 10.75, (TimedSpan("linear", 10.0, 10.25), TimedSpan("add", 10.25, 10.5)))
    profile.add(STEP, times, 3, 11.0)
    trace = profile.trace()
    [forward], [linear], [sample] = (slices(trace, name) for name in ("forward", "linear", "sample"))
    assert (forward["ts"], forward["dur"], sample["ts"]) == (10.0e6, 0.5e6, 10.5e6)
    assert forward["tid"] == linear["tid"] == sample["tid"]
    assert (linear["ts"], linear["dur"]) == (10.0e6, 0.25e6)
    assert forward["args"] == {"step": 5, "sequences": 3, "prefill_tokens": 40, "decode_tokens": 2}
    assert slices(trace, "schedule")[0]["tid"] != forward["tid"]


def test_a_profile_is_bounded() -> None:
    profile = Profile(2)
    for _ in range(5):
        profile.add(STEP, None, 1, 1.0)
    assert profile.full
    assert len(slices(profile.trace(), "execute")) == 2
    assert len(slices(Profile(0).trace(), "execute")) == 0


def test_the_loop_notes_the_steps_between_start_and_stop(bench: MakeBench) -> None:
    engine = bench(rule="echo")
    engine.step(Submit(REQUEST))
    engine.step(StartProfile(10))
    [profiled, *_] = engine.step(StopProfile())
    assert isinstance(profiled, Profiled)
    assert [event["args"]["step"] for event in slices(profiled.trace, "forward")] == [2]
    assert len(slices(profiled.trace, "pretend")) == 1  # the fake executor's only operation


def test_one_step_of_sixty_four_tells_the_times_of_its_operations(bench: MakeBench) -> None:
    engine = bench(rule="echo")
    engine.link.commands = [Submit(GenerationRequest(1, (1, 2), SamplingParams(200), seed=0))]
    told = []
    for _ in range(128):
        engine.loop.step()
        told += [event.stats for event in engine.link.take() if isinstance(event, StepDone)]
    assert [stats.step_id for stats in told if stats.kernel_seconds] == [64, 128]
    assert [name for name, _ in told[63].kernel_seconds] == ["pretend"]


async def test_a_profile_of_an_engine_process(start: Start, harness: Any) -> None:
    client = await start(step_seconds=0.002)
    with pytest.raises(ProfileRefused):
        await client.stop_profile()
    client.start_profile(3)
    with pytest.raises(ProfileRefused):
        client.start_profile(3)
    await harness.tokens(client.submit(harness.request(client, 6)))
    trace = await client.stop_profile()
    forwards = slices(trace, "forward")
    assert len(forwards) == 3
    assert all(event["dur"] >= 2000 for event in forwards)
    client.start_profile(3)  # another one can follow
    assert slices(await client.stop_profile(), "forward") == []


async def test_a_profile_is_lost_with_its_engine_and_the_next_can_be_taken(start: Start, harness: Any) -> None:
    client = await start()
    client.start_profile(3)
    pid = client.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await harness.until(lambda: client.counters.restarts == 1 and client.status.ready)
    with pytest.raises(ProfileRefused, match="died"):
        await client.stop_profile()
    client.start_profile(3)
    assert slices(await client.stop_profile(), "forward") == []
