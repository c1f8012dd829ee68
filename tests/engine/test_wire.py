"""Frames survive the trip, whatever pieces they arrive in."""

from __future__ import annotations

import random
import socket
from dataclasses import fields
from typing import Any

import pytest

from engine.config import EngineConfig, FakeOptions, Fault
from engine.constraints.vocabulary import Vocabulary
from engine.core.plan import SeqId
from engine.link import LinkClosed, SocketLink
from engine.types import (
    EngineInfo,
    ErrorKind,
    FinishReason,
    GenerationRequest,
    KVGroupStats,
    LoadProgress,
    Pooling,
    RequestUpdate,
    SamplingParams,
    StepStats,
    TokenLogprobs,
)
from engine.wire import (
    Abort,
    Command,
    Configure,
    Event,
    Fatal,
    FrameSplitter,
    Loading,
    News,
    Ping,
    Pong,
    Ready,
    ResetPrefixCache,
    Shutdown,
    StepBegun,
    StepDone,
    Submit,
    UseVocabulary,
    WireError,
    decode_command,
    decode_event,
    encode,
)

REQUEST = GenerationRequest(
    request_id=2**40,
    prompt_token_ids=(1, 2, 3),
    sampling=SamplingParams(
        8, bad_words=((4, 5),), logit_bias=((6, -1.5),), allowed_token_ids=(7,), logprobs=2, prompt_logprobs=0
    ),
    seed=2**64 - 1,
    stop_token_ids=(0,),
    output_token_ids=(9,),
    choice_index=2,
    cache_namespace=3,
    pooling=Pooling.MEAN,
)
LOGPROBS = TokenLogprobs(5, -0.25, 1, ((5, -0.25), (6, -9999.0)))
UPDATE = RequestUpdate(
    request_id=1,
    choice_index=1,
    new_token_ids=(5,),
    logprobs=(LOGPROBS,),
    prompt_logprobs=(None, LOGPROBS),
    num_cached_tokens=16,
    embedding=(0.5, 0.25),
    finish_reason=FinishReason.ERROR,
    stop_token_id=5,
    error="why",
    error_kind=ErrorKind.REJECTED,
)
STATS = StepStats(
    1, 2, 3, 4, 5, (KVGroupStats(6, 7, 8, 9),), 10, 11, 12, 13, 14, 15, 16, 17, gap_seconds=0.5, started_at=2.0
)
_VALUES: dict[str, Any] = {f.name: {"str": "x", "int": 1}.get(str(f.type), (2, 3)) for f in fields(EngineInfo)}
INFO = EngineInfo(**_VALUES)

COMMANDS: list[Command] = [
    Configure(EngineConfig("m", fake=FakeOptions(script=(1, 2), faults=(Fault("die", step=3),))), 2),
    Submit(REQUEST),
    Abort(1),
    Abort(1, 0),
    Ping(7),
    ResetPrefixCache(),
    UseVocabulary(Vocabulary((b"a", b"\xff"), (1,), (0,), b"{}")),
    Shutdown(),
]
EVENTS: list[Event] = [
    Loading(LoadProgress("reading", 0.5)),
    Ready(INFO),
    StepBegun(3, (SeqId(1, 0), SeqId(2, 1)), (1, 7), (SeqId(2, 1),), (SeqId(9, 0),), 1, 2, 3),
    StepDone((UPDATE, RequestUpdate(2, 0, (3,))), STATS),
    News((UPDATE,), STATS),
    Pong(7),
    Fatal("model", "no tensor"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda frame: type(frame).__name__)
def test_commands_come_back_equal(command: Command) -> None:
    [body] = FrameSplitter().feed(encode(command))
    assert decode_command(body) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda frame: type(frame).__name__)
def test_events_come_back_equal(event: Event) -> None:
    [body] = FrameSplitter().feed(encode(event))
    assert decode_event(body) == event


def test_the_splitter_does_not_care_where_the_stream_is_cut() -> None:
    stream = b"".join(encode(event) for event in EVENTS)
    rng = random.Random(0)
    for _ in range(50):
        splitter, events, rest = FrameSplitter(), [], stream
        while rest:
            cut = rng.randint(1, 40)
            events += [decode_event(body) for body in splitter.feed(rest[:cut])]
            rest = rest[cut:]
        assert events == EVENTS


def test_nonsense_is_an_error() -> None:
    with pytest.raises(WireError):
        decode_event(b"\x93\xa4ping")
    with pytest.raises(WireError):
        FrameSplitter().feed(b"\xff\xff\xff\xff")


def test_a_link_hands_out_what_arrived_before_the_other_end_closed() -> None:
    ours, theirs = socket.socketpair()
    link = SocketLink(theirs)
    ours.sendall(encode(Ping(1)) + encode(Ping(2)))
    ours.close()
    assert link.receive(None) == [Ping(1), Ping(2)]
    with pytest.raises(LinkClosed):
        link.receive(None)
    theirs.close()


def test_an_empty_link_returns_after_its_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert SocketLink(theirs).receive(0) == []
        assert SocketLink(theirs).receive(0.01) == []


def test_a_server_that_does_not_read_costs_memory_and_loses_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = SocketLink(theirs)
        frames = [News((RequestUpdate(i, 0, (7,) * 1000),), STATS) for i in range(3000)]
        for frame in frames:  # more than the socket holds, and nobody reads
            link.send(frame)
        splitter = FrameSplitter()
        received: list[Event] = []
        while len(received) < len(frames):
            received += [decode_event(body) for body in splitter.feed(ours.recv(1 << 20))]
            link.receive(0)
        assert received == frames
