"""Sends sessions by the load's shape and collects the records.

What keeps the figures honest:
- open loop: every arrival has its time before the run begins, and latency counts from that time, however late
  the client or the server is (no coordinated omission);
- nothing is dropped: what is still running when the run ends is recorded as `unfinished` with the time waited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loadtest.client import Client
from loadtest.connection import Clock
from loadtest.records import Request, RequestRecord
from loadtest.sessions import Session
from loadtest.workloads import Intrusion


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a run ends: nothing is sent after `duration_seconds`; what runs then gets `grace_seconds` more."""

    duration_seconds: float = 600.0
    grace_seconds: float = 60.0
    max_in_flight: int = 1024  # open loop: more wait in the client, their time counted


@dataclass(slots=True)
class Live:
    """Counters of a run in progress, for the eyes; the figures come from the records."""

    num_planned: int = 0
    num_in_flight: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_chunks: int = 0


class Runner:
    """One run. `records` grows as requests end; `stop()` makes the run send nothing more."""

    def __init__(self, client: Client, bounds: Bounds, clock: Clock) -> None:
        self.live = Live()
        self.records: list[RequestRecord] = []
        self.started_at = 0.0
        self._client = client
        self._bounds = bounds
        self._clock = clock
        self._slots = asyncio.Semaphore(bounds.max_in_flight)
        self._stopped = False

    def stop(self) -> None:
        """Nothing more is sent; what runs may end."""
        self._stopped = True

    async def closed(self, sessions: Sequence[Session], users: int) -> None:
        """Each of `users` plays the next session as soon as its last has ended."""
        self._begin(sessions)
        await self._play_all(iter(sessions), users)

    async def open(self, sessions: Sequence[Session], times: Sequence[float]) -> None:
        """Session i starts at `times[i]` seconds, whatever has ended by then."""
        self._begin(sessions)
        async with asyncio.TaskGroup() as group:
            for session, at in zip(sessions, times, strict=True):
                scheduled_at = self.started_at + at
                await asyncio.sleep(max(0.0, scheduled_at - self._clock()))  # 0 still lets the sockets be read
                if self._over(scheduled_at):
                    break
                group.create_task(self._play_in_slot(session, scheduled_at))

    async def intrusion(self, sessions: Sequence[Session], load: Intrusion) -> None:
        """The background class starts at once; the others follow when each of its streams has produced
        `load.after_tokens` chunks (or ended)."""
        self._begin(sessions)
        background = [session for session in sessions if session.label == load.background]
        intruders = [session for session in sessions if session.label != load.background]
        produced = [0] * len(background)
        ready = asyncio.Event()

        def advance(stream: int, num_tokens: int) -> None:
            produced[stream] += num_tokens
            if not ready.is_set() and min(produced) >= load.after_tokens:
                ready.set()

        async def play(stream: int, session: Session) -> None:
            await self._play(session, self.started_at, lambda: advance(stream, 1))
            advance(stream, load.after_tokens)  # one that ended early keeps nobody waiting

        async with asyncio.TaskGroup() as group:
            for stream, session in enumerate(background):
                group.create_task(play(stream, session))
            if background:
                await ready.wait()
            await self._play_all(iter(intruders), load.users)

    def _begin(self, sessions: Sequence[Session]) -> None:
        self.live.num_planned = sum(len(session.turns) for session in sessions)
        self.started_at = self._clock()

    def _over(self, now: float) -> bool:
        return self._stopped or now - self.started_at > self._bounds.duration_seconds

    async def _play_all(self, sessions: Iterator[Session], users: int) -> None:
        async def user() -> None:
            for session in sessions:
                now = self._clock()
                if self._over(now):
                    return
                await self._play(session, now)

        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())

    async def _play_in_slot(self, session: Session, scheduled_at: float) -> None:
        async with self._slots:
            await self._play(session, scheduled_at)

    async def _play(self, session: Session, scheduled_at: float, on_text: Callable[[], None] = lambda: None) -> None:
        answers: list[str] = []
        for turn in range(len(session.turns)):
            if turn:
                await asyncio.sleep(max(0.0, scheduled_at - self._clock()))
                if self._over(scheduled_at):
                    return
            record = await self._send(session.request(turn, answers), scheduled_at, on_text)
            if not record.served:
                return
            answers.append(record.text)
            scheduled_at = record.ended_at + session.think_seconds

    async def _send(self, request: Request, scheduled_at: float, on_text: Callable[[], None]) -> RequestRecord:
        live = self.live

        def count() -> None:
            live.num_chunks += 1
            on_text()

        live.num_in_flight += 1
        deadline = self.started_at + self._bounds.duration_seconds + self._bounds.grace_seconds
        record = await self._client.send(request, scheduled_at, deadline=deadline, on_text=count)
        live.num_in_flight -= 1
        live.num_ended += 1
        live.num_failed += not record.ok
        self.records.append(record)
        return record
