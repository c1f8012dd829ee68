"""Clients of fake engines, each with its own process, that are gone when the test ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.client import EngineClient, RequestStream
from engine.config import EngineConfig, FakeOptions
from engine.core.scheduler import Scheduler
from engine.executor import Executor
from engine.fake_executor import build_fake_executor
from engine.link import LinkClosed
from engine.loop import EngineLoop
from engine.recovery import RecoveryOptions
from engine.supervisor import SupervisorOptions
from engine.types import GenerationRequest, RequestUpdate, SamplingParams
from engine.watchdog import Limits
from engine.wire import Command, Event, News, StepDone, Submit

QUICK = SupervisorOptions(
    limits=Limits(
        start_seconds=20, first_step_seconds=2, step_seconds=1.5, ping_interval_seconds=0.1, pong_seconds=1.5
    ),
    recovery=RecoveryOptions(first_delay_seconds=0.05, max_delay_seconds=0.1, open_seconds=0.3),
)


class Harness:
    """What the tests do with a client."""

    quick = QUICK

    @staticmethod
    def config(**fake: Any) -> EngineConfig:
        return EngineConfig("", max_num_batched_tokens=2048, executor="fake", fake=FakeOptions(**fake))

    @staticmethod
    def request(client: EngineClient, max_tokens: int = 20, **rest: Any) -> GenerationRequest:
        sampling = SamplingParams(max_tokens)
        request_id = client.new_request_id()
        whole = GenerationRequest(request_id, tuple(range(1, 20)), sampling, seed=request_id)
        return replace(whole, **rest)

    @staticmethod
    async def collect(stream: RequestStream) -> dict[int, list[RequestUpdate]]:
        """All updates by choice; checks that each choice's last update, and no other, is terminal."""
        updates: dict[int, list[RequestUpdate]] = {}
        async for batch in stream:
            assert batch
            for update in batch:
                updates.setdefault(update.choice_index, []).append(update)
        assert sorted(updates) == list(range(stream.request.n))
        for choice in updates.values():
            assert [u.finish_reason is not None for u in choice] == [False] * (len(choice) - 1) + [True]
        return updates

    @classmethod
    async def tokens(cls, stream: RequestStream) -> list[tuple[int, ...]]:
        """The tokens of each choice."""
        updates = await cls.collect(stream)
        return [sum((u.new_token_ids for u in updates[k]), ()) for k in sorted(updates)]

    @staticmethod
    async def until(condition: Callable[[], object], seconds: float = 10) -> None:
        """Poll, because what is awaited happens in another process."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[EngineClient]]]:
    """Start a fake engine with these options and wait until it is ready."""
    clients = []

    async def start_client(
        options: SupervisorOptions = QUICK, config: EngineConfig | None = None, **fake: Any
    ) -> EngineClient:
        client = EngineClient(config or Harness.config(**fake), options)
        clients.append(client)
        await client.start()
        await client.wait_ready()
        return client

    yield start_client
    for client in clients:
        await client.close()


class ListLink:
    """A link without a socket: commands are put in, events come out."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.events: list[Event] = []

    def receive(self, timeout_seconds: float | None) -> list[Command]:
        if timeout_seconds is None and not self.commands:
            raise LinkClosed("nobody is left to wait for")
        commands, self.commands = self.commands, []
        return commands

    def send(self, event: Event) -> None:
        self.events.append(event)

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events


class Bench:
    """An engine loop on the test's own thread."""

    def __init__(self, *, depth: int = 1, executor: Executor | None = None, **fake: Any) -> None:
        fake_executor, info = build_fake_executor(Harness.config(**fake), lambda progress: None, 1)
        self.executor = executor or fake_executor
        self.scheduler = Scheduler(
            fake_executor.capacity(),
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_num_seqs=info.max_num_seqs,
            max_model_len=info.max_model_len,
        )
        self.link = ListLink()
        self.loop = EngineLoop(self.scheduler, self.executor, self.link, depth=depth)

    def step(self, *commands: Command) -> list[Event]:
        """Send commands, take one step, return what the loop said."""
        self.link.commands += commands
        self.loop.step()
        return self.link.take()

    def generate(self, request: GenerationRequest) -> list[tuple[int, ...]]:
        """The tokens of each choice, undisturbed."""
        tokens: dict[int, tuple[int, ...]] = {}
        events = self.step(Submit(request))
        while self.loop.busy:
            events += self.step()
        for event in events:
            if isinstance(event, StepDone | News):
                for update in event.updates:
                    tokens[update.choice_index] = tokens.get(update.choice_index, ()) + update.new_token_ids
        return [tokens[k] for k in sorted(tokens)]


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench
