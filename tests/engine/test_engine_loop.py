"""The loop driven by hand: no process, no socket, no clock that matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, cast

import pytest

from engine.config import Fault
from engine.core.plan import SeqId
from engine.link import LinkClosed
from engine.loop import EngineLoop
from engine.types import CacheBranch, ErrorKind, FinishReason, GenerationRequest, RequestUpdate, SamplingParams
from engine.wire import (
    Abort,
    CacheBranches,
    Command,
    LookAtCache,
    News,
    Ping,
    Pong,
    Shutdown,
    StepBegun,
    StepDone,
    Submit,
)

MakeBench = Callable[..., Any]

REQUEST = GenerationRequest(
    request_id=1, prompt_token_ids=(11, 12, 13), sampling=SamplingParams(3, temperature=0.0), seed=0
)
ECHO = {"rule": "echo"}


def done(events: list[Any]) -> StepDone:
    [event] = [event for event in events if isinstance(event, StepDone)]
    return event


def test_a_step_begins_runs_and_tells_in_one_frame(bench: MakeBench) -> None:
    begun, finished = bench(**ECHO).step(Submit(REQUEST))
    assert begun == StepBegun(1, (SeqId(1, 0),), (3,), admitted=(SeqId(1, 0),))
    assert finished.updates == (RequestUpdate(1, 0, (11,)),)
    stats = finished.stats
    assert (stats.step_id, stats.num_running, stats.num_prefill_tokens, stats.num_decode_tokens) == (1, 1, 3, 0)


def test_a_request_runs_to_its_end(bench: MakeBench) -> None:
    engine = bench(**ECHO)
    updates = [done(engine.step(*commands)).updates for commands in ([Submit(REQUEST)], [], [])]
    assert updates == [
        (RequestUpdate(1, 0, (11,)),),
        (RequestUpdate(1, 0, (12,)),),
        (RequestUpdate(1, 0, (13,), finish_reason=FinishReason.LENGTH),),
    ]
    assert not engine.loop.busy


def test_the_times_of_a_step_are_filled_in(bench: MakeBench) -> None:
    engine = bench(**ECHO)
    clock = iter([10.0, 10.5, 12.5, 12.75, 13.0, 15.0, 15.5, 16.5, 17.5, 18.0])
    loop = EngineLoop(engine.scheduler, engine.executor, engine.link, clock=lambda: next(clock))
    engine.link.commands = [Submit(REQUEST)]
    loop.step()
    stats = done(engine.link.take()).stats
    assert (stats.started_at, stats.schedule_seconds, stats.execute_seconds, stats.update_seconds) == (
        10.0,
        0.5,
        2.0,
        0.25,
    )
    assert (stats.publish_seconds, stats.gap_seconds) == (0.0, 0.0)  # the first: nothing was told before it
    loop.step()
    stats = done(engine.link.take()).stats
    assert (stats.publish_seconds, stats.gap_seconds) == (0.25, 2.0)


def test_the_tokens_of_experts_are_told_with_and_without_a_step(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench(**ECHO)
    collect = engine.executor.collect
    totals = iter([(1, 5), (4, 8)])
    monkeypatch.setattr(
        engine.executor, "collect", lambda ticket: replace(collect(ticket), expert_tokens_total=next(totals))
    )
    assert done(engine.step(Submit(REQUEST))).stats.expert_tokens_total == (1, 5)
    assert done(engine.step()).stats.expert_tokens_total == (4, 8)
    [news] = engine.step(Abort(1))
    assert isinstance(news, News)
    assert news.stats.expert_tokens_total == (4, 8)


def test_idle_time_is_no_gap(bench: MakeBench) -> None:
    engine = bench(**ECHO)
    clock = count(step=1.0)
    loop = EngineLoop(engine.scheduler, engine.executor, engine.link, clock=lambda: next(clock))
    for request_id in (1, 2):
        engine.link.commands = [Submit(replace(REQUEST, request_id=request_id, sampling=SamplingParams(1)))]
        loop.step()
        assert done(engine.link.take()).stats.gap_seconds == 0.0


def test_without_work_a_step_says_nothing(bench: MakeBench) -> None:
    assert bench().step() == []


def test_a_request_that_can_never_run_is_refused_and_the_next_is_served(bench: MakeBench) -> None:
    too_long = replace(REQUEST, request_id=2, prompt_token_ids=(1,) * 9000, n=2)
    news, _, finished = bench(**ECHO).step(Submit(too_long), Submit(REQUEST))
    assert [(u.request_id, u.choice_index, u.finish_reason, u.error_kind) for u in news.updates] == [
        (2, 0, FinishReason.ERROR, ErrorKind.REJECTED),
        (2, 1, FinishReason.ERROR, ErrorKind.REJECTED),
    ]
    assert "8192" in news.updates[0].error
    assert finished.updates == (RequestUpdate(1, 0, (11,)),)


def test_a_request_that_breaks_add_fails_alone(bench: MakeBench) -> None:
    engine = bench(**ECHO)
    nonsense = replace(REQUEST, request_id=2, prompt_token_ids=cast(Any, None))
    news, _, finished = engine.step(Submit(nonsense), Submit(REQUEST))
    [update] = news.updates
    assert (update.request_id, update.finish_reason, update.error_kind) == (2, FinishReason.ERROR, ErrorKind.INTERNAL)
    assert finished.updates == (RequestUpdate(1, 0, (11,)),)


def test_an_abort_is_told_before_the_next_step_which_runs_without_it(bench: MakeBench) -> None:
    engine = bench(**ECHO)
    engine.step(Submit(REQUEST), Submit(replace(REQUEST, request_id=2)))
    news, begun, _ = engine.step(Abort(1))
    assert news.updates == (RequestUpdate(1, 0, finish_reason=FinishReason.ABORT),)
    assert news.stats.num_running == 1
    assert begun.seq_ids == (SeqId(2, 0),)


def test_one_choice_can_be_aborted(bench: MakeBench) -> None:
    engine = bench(**ECHO)
    engine.step(Submit(replace(REQUEST, n=3)))
    news, begun, _ = engine.step(Abort(1, 1))
    assert [(u.choice_index, u.finish_reason) for u in news.updates] == [(1, FinishReason.ABORT)]
    assert begun.seq_ids == (SeqId(1, 0), SeqId(1, 2))


def test_a_sequence_that_fails_ends_alone(bench: MakeBench) -> None:
    engine = bench(rule="echo", faults=(Fault("error", token_id=99),))
    bad = replace(REQUEST, request_id=2, prompt_token_ids=(99,))
    updates = done(engine.step(Submit(bad), Submit(REQUEST))).updates
    assert [(u.request_id, u.finish_reason, u.error) for u in updates] == [
        (2, FinishReason.ERROR, "scripted failure of this sequence"),
        (1, None, None),
    ]


def test_a_step_that_fails_as_a_whole_comes_out_of_step(bench: MakeBench) -> None:
    engine = bench(faults=(Fault("raise", step=1),))
    with pytest.raises(RuntimeError):
        engine.step(Submit(REQUEST))
    assert engine.link.take() == [StepBegun(1, (SeqId(1, 0),), (3,), admitted=(SeqId(1, 0),))]


def test_pings_are_answered_in_order_with_the_steps(bench: MakeBench) -> None:
    engine = bench(**ECHO)
    first, *_ = engine.step(Ping(4), Submit(REQUEST))
    assert first == Pong(4)


def test_with_depth_two_a_step_begins_before_the_one_before_is_told(bench: MakeBench) -> None:
    engine = bench(depth=2, **ECHO)
    assert [type(event) for event in engine.step(Submit(REQUEST))] == [StepBegun, StepBegun, StepDone]
    assert [type(event) for event in engine.step()] == [StepBegun, StepDone]
    assert [type(event) for event in engine.step()] == [StepDone]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_tokens_do_not_depend_on_the_depth(bench: MakeBench, depth: int) -> None:
    request = replace(REQUEST, sampling=SamplingParams(30), n=3)
    assert bench(depth=depth).generate(request) == bench().generate(request)


def test_run_steps_until_told_to_shut_down(bench: MakeBench) -> None:
    engine = bench(**ECHO)
    commands: list[list[Command]] = [[Submit(REQUEST)], [], [], [Shutdown()]]
    engine.link.receive = lambda timeout_seconds: commands.pop(0) if timeout_seconds != 0 or commands[0] else []
    engine.loop.run()
    assert engine.loop.stopping


def test_run_ends_when_the_server_has_gone(bench: MakeBench) -> None:
    engine = bench(**ECHO)
    engine.link.commands = [Submit(REQUEST)]
    with pytest.raises(LinkClosed):
        engine.loop.run()
    assert [type(event) for event in engine.link.take()].count(StepDone) == 3


def test_the_cache_can_be_looked_at(bench: MakeBench) -> None:
    engine = bench(**ECHO)
    engine.step(Submit(replace(REQUEST, prompt_token_ids=tuple(range(40)))))
    [told, *_] = engine.step(LookAtCache(5))
    assert told == CacheBranches((CacheBranch(-1, 0, 32, 32, 1),))
