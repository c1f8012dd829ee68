"""The server's face of the engine: submit a request, iterate over its updates.

Everything happens in one event loop. Updates are handed over per request and step, by a future that the consumer
waits on; nothing here ever waits for a consumer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from engine.config import EngineConfig
from engine.constraints.vocabulary import Vocabulary
from engine.errors import EngineDead, EngineDraining, EngineUnavailable
from engine.flight_recorder import Record
from engine.inflight import Entry, InFlight
from engine.supervisor import Counters, EngineState, Supervisor, SupervisorOptions
from engine.types import (
    CacheBranch,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    LoadProgress,
    RequestUpdate,
    StepStats,
)
from engine.wire import Abort, LookAtCache, ResetPrefixCache, StepBegun

logger = logging.getLogger(__name__)

StepListener = Callable[[StepStats, StepBegun], None]  # the state after a step, and what ran in it
_UPDATES_A_TURN = 16  # that a consumer who has fallen behind gets in one turn of the loop: the other streams wait


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What a health route needs."""

    state: EngineState
    draining: bool
    reason: str  # why requests are not taken or have to wait; "" when all is well
    progress: LoadProgress | None  # of the last start
    retry_after_seconds: float  # a guess at when to come back; 0 when ready

    @property
    def ready(self) -> bool:
        """An engine runs and takes requests at once."""
        return self.state is EngineState.READY and not self.draining


class RequestStream:
    """The updates of one request: an async iterator over lists of them, in order of arrival.

    A consumer that has fallen behind gets what has piled up in portions, with a turn of the event loop between them.
    Ends after the terminal update of the last choice. Leaving earlier (aclose(), the end of `async with`, a cancelled
    `async for`, garbage collection) aborts the rest in the engine. One consumer.
    """

    def __init__(self, client: EngineClient, entry: Entry) -> None:
        self._client = client
        self._entry = entry
        self._loop = asyncio.get_running_loop()
        self._behind = False

    @property
    def request(self) -> GenerationRequest:
        return self._entry.request

    @property
    def begun_at(self) -> float | None:
        """time.monotonic() of the begin of the first step that ran some of it; None while it waits."""
        return self._entry.begun_at

    @property
    def finished(self) -> bool:
        """Whether all has been taken: the next step of the iteration would end it."""
        return self._entry.finished and not self._entry.pending

    async def wait(self, timeout_seconds: float) -> bool:
        """Whether there is something to take (or the end) within the time; takes nothing, aborts nothing."""
        if self._entry.pending or self._entry.finished:
            return True
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._entry.wait()
        except TimeoutError:
            return False
        return True

    async def aclose(self) -> None:
        """Take no more; what has not ended is aborted. Does not wait."""
        self._client.discard(self._entry)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[RequestUpdate]:
        entry = self._entry
        if self._behind or not entry.pending:
            try:
                await (asyncio.sleep(0) if self._behind else entry.wait())
            except asyncio.CancelledError:
                self._client.discard(entry)
                raise
            if not entry.pending:
                raise StopAsyncIteration
        updates = entry.pending[:_UPDATES_A_TURN]
        del entry.pending[:_UPDATES_A_TURN]
        self._behind = bool(entry.pending)
        return updates

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:  # the collector may run in any thread, and after the loop
        if not self._entry.finished and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._client.discard, self._entry)


class EngineClient:
    """One engine, kept alive by a supervisor. Make it and use it in one running event loop."""

    def __init__(self, config: EngineConfig, options: SupervisorOptions | None = None) -> None:
        self._table = InFlight()
        self._supervisor = Supervisor(config, options or SupervisorOptions(), self._table, self._note_step)
        self._task: asyncio.Task[None] | None = None
        self._request_ids = itertools.count(1)
        self._draining = False
        self._listeners: list[StepListener] = []

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Spawn the engine; returns before it has loaded (see wait_ready and status)."""
        if self._task is not None:
            raise RuntimeError("started already")
        self._task = asyncio.create_task(self._supervisor.run(), name="engine-supervisor")

    async def wait_ready(self) -> EngineInfo:
        """Until the first engine has loaded. Raises what kept it: ModelError, ConfigError, EngineDead."""
        await self._supervisor.wait_started()
        if self._supervisor.failure is not None:
            raise self._supervisor.failure
        if self._supervisor.info is None:
            raise EngineDead("closed while starting")
        return self._supervisor.info

    async def drain(self, timeout_seconds: float) -> bool:
        """Take nothing new and wait for what runs; whether all of it ended within the time."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._table.wait_empty()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End the engine process and wait until it is gone; requests still in flight end with an error."""
        self._draining = True
        self._supervisor.close()
        if self._task is not None:
            await self._task

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Tell this and every later engine the tokenizer: without it a request with a constraint is refused."""
        self._supervisor.use_vocabulary(vocabulary)

    # --- requests ----------------------------------------------------------------------------------------------------

    def new_request_id(self) -> int:
        """Unique in the life of this client."""
        return next(self._request_ids)

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Accept a request: from here on each choice gets exactly one terminal update. While the engine restarts the
        request waits for the next one. Raises EngineDraining, EngineDead or another EngineUnavailable if nothing is
        taken now, ValueError if the id is in use."""
        state = self._supervisor.state
        if self._draining:
            raise EngineDraining("the server is shutting down")
        if state in (EngineState.BROKEN, EngineState.STOPPED):
            raise EngineDead(self._supervisor.reason)
        if state is EngineState.STARTING:
            raise EngineUnavailable("the model is loading")
        entry = self._table.add(request)
        self._supervisor.submit(entry)
        return RequestStream(self, entry)

    def abort(self, request_id: int, choice_index: int | None = None) -> None:
        """End one choice, or all of a request: terminal updates follow. Nothing happens to those that have ended."""
        entry = self._table.get(request_id)
        if entry is None:
            return
        in_engine = False
        for choice in entry.choices.values():
            if choice.finished or choice_index not in (None, choice.seq_id.choice_index):
                continue
            choice.aborted = True
            in_engine = in_engine or choice.submitted
            if not choice.submitted:
                self._table.finish(choice.seq_id, FinishReason.ABORT)
        if in_engine:
            self._supervisor.send(Abort(request_id, choice_index))

    def discard(self, entry: Entry) -> None:
        """Nobody listens to this request any more."""
        self._supervisor.drop(entry)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        self._supervisor.send(ResetPrefixCache())

    def look_at_cache(self, max_branches: int) -> tuple[CacheBranch, ...]:
        """Ask for the largest branches of the prefix cache's tree; what came of the request before this one."""
        self._supervisor.send(LookAtCache(max_branches))
        return self._supervisor.cache_branches

    def start_profile(self, max_steps: int) -> None:
        """Note what the next so many steps of the engine do. Raises EngineUnavailable, ProfileRefused."""
        self._supervisor.start_profile(max_steps)

    async def stop_profile(self) -> bytes:
        """What was noted, as Chrome's Trace Event JSON. Raises ProfileRefused."""
        return await self._supervisor.stop_profile()

    # --- what is going on --------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo | None:
        """Of the last engine that loaded; None while the first one loads."""
        return self._supervisor.info

    @property
    def status(self) -> EngineStatus:
        supervisor = self._supervisor
        retry_after = 0.0
        if supervisor.state is EngineState.BROKEN:
            retry_after = max(1.0, supervisor.retry_at - time.monotonic())
        elif supervisor.state is not EngineState.READY or self._draining:
            retry_after = 1.0
        reason = "the server is shutting down" if self._draining else supervisor.reason
        return EngineStatus(supervisor.state, self._draining, reason, supervisor.progress, retry_after)

    @property
    def num_in_flight(self) -> int:
        """Requests accepted and not ended."""
        return len(self._table)

    @property
    def counters(self) -> Counters:
        """Restarts and their consequences, since this client was made."""
        return self._supervisor.counters

    @property
    def engine_pid(self) -> int | None:
        """Of the engine process, while there is one."""
        return self._supervisor.pid

    def flight_record(self) -> Record:
        """What is known of the engine, its last steps and the open requests: JSON, numbers only."""
        return self._supervisor.flight_record()

    def stats(self) -> StepStats | None:
        """The engine's state after the latest step, abort or reset; None before the first of its life."""
        return self._supervisor.stats

    def longest_wait_seconds(self) -> float:
        """Of the oldest accepted request that has not run yet; 0 if there is none."""
        return self._table.longest_wait_seconds()

    def add_step_listener(self, listener: StepListener) -> None:
        """Call this after every step; it must be quick and must not raise."""
        self._listeners.append(listener)

    def remove_step_listener(self, listener: StepListener) -> None:
        """Call it no more."""
        self._listeners.remove(listener)

    def _note_step(self, stats: StepStats, begun: StepBegun) -> None:
        for listener in self._listeners:
            try:
                listener(stats, begun)
            except Exception:  # a fault in monitoring must not stop the delivery
                logger.exception("a step listener failed")
