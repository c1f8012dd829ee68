"""Keeps an engine process alive: start, watch, restart, and carry the requests over.

Lives in the server's event loop. One task (`run`) goes through the lives of the engine one after another:

    spawn → loading → (suspects alone) → replay what is in flight → serve … death → kill, reap → wait → spawn …

An engine is dead when its connection ends, and stuck when the watchdog says so; both are handled alike. Requests in
flight stay in the table all the while; every new engine is sent what it does not have. A choice under which engines
keep dying is run alone; if the engine dies again it ends with an error, and the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from engine.child import Death, EngineProcess
from engine.config import EngineConfig
from engine.constraints.vocabulary import Vocabulary
from engine.core.plan import SeqId
from engine.errors import ConfigError, EngineDead, EngineError, EngineUnavailable, ModelError
from engine.flight_recorder import FlightRecorder, Record, write_dump
from engine.inflight import Choice, Entry, InFlight
from engine.logs import REQUEST, LogFormat
from engine.profile_request import ProfileRequest
from engine.recovery import Recovery, RecoveryOptions
from engine.types import (
    CacheBranch,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    LoadProgress,
    RequestUpdate,
    StepStats,
)
from engine.watchdog import Limits, Watchdog
from engine.wire import (
    Abort,
    CacheBranches,
    Command,
    Event,
    Fatal,
    Loading,
    News,
    Ping,
    Pong,
    Profiled,
    Ready,
    Shutdown,
    StartProfile,
    StepBegun,
    StepDone,
    StopProfile,
    Submit,
    UseVocabulary,
)

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 1.0  # from the end of the connection to the end of the process
_DUMP_SECONDS = 0.2  # for a stuck process to write down where it is


class EngineState(StrEnum):
    """What the server can promise."""

    STARTING = "starting"  # the first engine loads
    READY = "ready"
    RESTARTING = "restarting"  # requests are kept, and taken, for the next engine
    BROKEN = "broken"  # engine after engine died: nothing is taken until the next attempt succeeds
    STOPPED = "stopped"  # closed, or the first start failed


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """Time limits and the restart policy."""

    limits: Limits = field(default_factory=Limits)
    recovery: RecoveryOptions = field(default_factory=RecoveryOptions)
    shutdown_seconds: float = 10.0  # for a ready engine to exit by itself
    flight_steps: int = 256  # the last so many steps are remembered
    flight_folder: Path | None = None  # where they are written down when the engine dies; None = nowhere
    log_format: LogFormat = "console"  # of the engine process's lines


@dataclass(slots=True)
class Counters:
    """Since the client was made."""

    restarts: int = 0
    replayed_choices: int = 0
    failed_choices: int = 0  # ended by an error because the engine died
    dropped_tokens: int = 0  # that the engine sent and nobody waited for


class _EngineLostError(Exception):
    """The engine of this life is dead or stuck."""


class Supervisor:
    """See the module. `on_step` gets the statistics of each step, and what ran in it."""

    def __init__(
        self,
        config: EngineConfig,
        options: SupervisorOptions,
        table: InFlight,
        on_step: Callable[[StepStats, StepBegun], None],
    ) -> None:
        self.state = EngineState.STARTING
        self.info: EngineInfo | None = None
        self.progress: LoadProgress | None = None
        self.stats: StepStats | None = None  # the latest state of the running engine
        self.cache_branches: tuple[CacheBranch, ...] = ()  # when the engine was last asked
        self.reason = ""  # why the state is not READY
        self.failure: EngineError | None = None  # why the first start failed
        self.retry_at = 0.0  # loop time of the next attempt while BROKEN
        self.counters = Counters()
        self._config = config
        self._options = options
        self._table = table
        self._on_step = on_step
        self._recovery = Recovery(options.recovery)
        self._recorder = FlightRecorder(options.flight_steps)
        self._vocabulary: Vocabulary | None = None
        self._closing = asyncio.Event()
        self._changed = asyncio.Event()  # something arrived, or the engine was lost
        self._life = 0
        # of the engine of this life:
        self._engine: EngineProcess | None = None
        self._lost = True
        self._stuck = False
        self._loaded = False
        self._fatal: Fatal | None = None
        self._running: dict[int, StepBegun] = {}  # steps begun and not done, by their ids
        self._alone: SeqId | None = None  # the suspect on trial
        self._watchdog = Watchdog(options.limits, 0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._profile = ProfileRequest()

    @property
    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        return None if self._engine is None else self._engine.pid

    def send(self, command: Command) -> None:
        """To the engine of this life, if there is one."""
        if self._engine is not None and not self._lost:
            self._engine.send(command)

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Tell the engine, and every later one, the tokenizer."""
        self._vocabulary = vocabulary
        if self._loaded:
            self.send(UseVocabulary(vocabulary))

    def submit(self, entry: Entry) -> None:
        """Send a new request to the engine, or leave it in the table for the next one."""
        if self.state is EngineState.READY:
            self._send_requests(self._table.take(entry))

    def drop(self, entry: Entry) -> None:
        """Nobody waits for this request any more: what has not ended is aborted, what was not taken is counted."""
        if self._table.drop(entry):
            self.send(Abort(entry.request.request_id))
        self.counters.dropped_tokens = self._table.num_dropped_tokens

    def flight_record(self) -> Record:
        """What is known of the engine, its last steps and the open requests: JSON."""
        return {
            "state": self.state,
            "reason": self.reason,
            "life": self._life,
            "pid": self.pid,
            "config": asdict(self._config),
            "info": None if self.info is None else asdict(self.info),
            "counters": asdict(self.counters),
            "stats": None if self.stats is None else asdict(self.stats),
            "steps_under_way": list(self._running),
            "open_requests": self._table.records(),
            "steps": self._recorder.records(),
        }

    def start_profile(self, max_steps: int) -> None:
        """Let the engine note what its next steps do. Raises EngineUnavailable, ProfileRefused while one is taken."""
        if self.state is not EngineState.READY:
            raise EngineUnavailable("there is no engine to profile")
        self._profile.begin()
        self.send(StartProfile(max_steps))

    async def stop_profile(self) -> bytes:
        """The trace: Chrome's Trace Event JSON. Raises ProfileRefused if none is taken or the engine died meanwhile."""
        return await self._profile.end(lambda: self.send(StopProfile()))

    def close(self) -> None:
        """Let `run` end: the engine is told to exit, and killed if it does not."""
        self._closing.set()
        self._changed.set()

    # --- the lives of the engine -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until closed, or until the first start has failed (see `failure`)."""
        try:
            while not self._closing.is_set():
                death = await self._live()
                if self._closing.is_set():
                    break
                if self.info is None:
                    self.failure = self._explain_failed_start(death)
                    break
                await self._after_death(death)
        except Exception:
            logger.exception("the supervisor failed")
            raise
        finally:
            self.state = EngineState.STOPPED
            self.reason = "closed" if self.failure is None else str(self.failure)
            self._fail_all("the server is shutting down")
            self._changed.set()

    async def wait_started(self) -> None:
        """Until the first start has succeeded or failed."""
        await self._until(lambda: self.state is not EngineState.STARTING)

    async def _live(self) -> Death:
        """One engine process from spawn to burial."""
        self._life += 1
        self._lost = self._stuck = self._loaded = False
        self._fatal = self._alone = None
        self._running = {}
        self._watchdog = Watchdog(self._options.limits, asyncio.get_running_loop().time())
        log_format = self._options.log_format
        try:
            engine = await EngineProcess.start(self._config, self._life, self._on_event, self._lose, log_format)
        except OSError as error:
            return Death(f"could not be started: {error}", from_outside=False)
        self._engine = engine
        self._check_watchdog()
        try:
            await self._serve()
            grace_seconds = self._options.shutdown_seconds if self._loaded else 0.0
            self.send(Shutdown())
        except _EngineLostError:
            grace_seconds = _DUMP_SECONDS if self._stuck else _EXIT_SECONDS
        finally:
            if self._timer is not None:
                self._timer.cancel()
        try:
            return await engine.end(grace_seconds)
        finally:
            self._lose()
            self._engine = None

    async def _serve(self) -> None:
        """Bring the engine up, hand it what is in flight, stay until closed."""
        await self._while_alive(lambda: self._loaded)
        await self._try_suspects()
        if not self._closing.is_set():
            self.state = EngineState.READY
            self.reason = ""
            self._changed.set()
            self._send_requests(self._table.take_all())
        await self._while_alive(lambda: False)

    def _send_requests(self, requests: Iterable[GenerationRequest]) -> None:
        for request in requests:
            self.send(Submit(request))

    async def _after_death(self, death: Death) -> None:
        """Find who is to blame, then wait as long as the history asks for."""
        reason = f"the engine {death.description}" + (f" ({self._fatal.message})" if self._fatal else "")
        self.reason = reason
        await self._write_flight_record()
        if not death.from_outside:
            self._blame(reason)
        decision = self._recovery.death(asyncio.get_running_loop().time())
        self.counters.restarts += 1
        if decision.open:
            self.state = EngineState.BROKEN
            self.retry_at = asyncio.get_running_loop().time() + decision.delay_seconds
            self._fail_all(f"{reason}; it kept failing, so nothing was carried over")
        logger.error(
            "%s; next start in %.1f s, %d requests in flight", reason, decision.delay_seconds, len(self._table)
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), decision.delay_seconds)

    async def _write_flight_record(self) -> None:
        folder = self._options.flight_folder
        if folder is not None:
            path = await asyncio.to_thread(write_dump, folder, self.flight_record())
            if path is not None:
                logger.error("its last steps are in %s", path)

    def _blame(self, reason: str) -> None:
        running = {seq_id for step in self._running.values() for seq_id in step.seq_ids}
        self._table.blame(running)
        if self._alone is not None and running <= {self._alone}:
            error = f"{reason} again and again while it ran this request"
            self.counters.failed_choices += self._table.finish(self._alone, FinishReason.ERROR, error)

    def _fail_all(self, error: str) -> None:
        self.counters.failed_choices += self._table.fail_all(error)

    def _explain_failed_start(self, death: Death) -> EngineError:
        if self._fatal is None:
            return EngineDead(f"the engine {death.description} while it started")
        kinds = {"config": ConfigError, "model": ModelError, "internal": EngineDead}
        return kinds[self._fatal.kind](self._fatal.message)

    # --- suspects ----------------------------------------------------------------------------------------------------

    async def _try_suspects(self) -> None:
        """Each suspect in turn has the engine to itself."""
        for entry, choice in self._table.suspects():
            if not choice.finished and not self._closing.is_set():
                self._alone = choice.seq_id
                await self._try_alone(entry, choice)
                self._alone = None

    async def _try_alone(self, entry: Entry, choice: Choice) -> None:
        """Run it until it has ended or got further than where engines died under it; then take it back, to be
        submitted again with all the others."""
        about = {"facts": {REQUEST: choice.seq_id.request_id}}
        logger.warning("request %d, choice %d runs alone: engines died under it", *choice.seq_id, extra=about)
        choice.submitted = True
        self.send(Submit(entry.replay(choice)))
        await self._while_alive(lambda: choice.finished or choice.deaths == 0)
        if not choice.finished:
            choice.parking = True
            self.send(Abort(*choice.seq_id))
            await self._while_alive(lambda: choice.finished or not choice.parking)

    # --- news from the engine ----------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if self._lost:
            return
        self._watchdog.heard(asyncio.get_running_loop().time())
        match event:
            case StepDone(updates, stats):
                self._watchdog.step_done()
                begun = self._running.pop(stats.step_id)
                self._recorder.done(stats, time.time())
                self._deliver(updates)
                self.stats = stats
                self._on_step(stats, begun)
            case StepBegun(step_id, seq_ids):
                self._watchdog.step_begun()
                self._table.note_begun(seq_ids)
                self._running[step_id] = event
                self._recorder.begun(self._life, event, time.time())
            case News(updates, stats):
                self._deliver(updates)
                self.stats = stats
            case Loading(progress):
                self.progress = progress
            case Ready(info):
                self._watchdog.ready()
                self.info = info
                # the server has been told this context: a later engine must not have a smaller one
                self._config = replace(self._config, max_model_len=info.max_model_len)
                self._loaded = True
                if self._vocabulary is not None:
                    self.send(UseVocabulary(self._vocabulary))
            case Fatal():
                self._fatal = event
            case CacheBranches(branches):
                self.cache_branches = branches
            case Profiled(trace):
                self._profile.told(trace)
            case Pong():
                pass  # that it came is all it says
        self._changed.set()

    def _deliver(self, updates: tuple[RequestUpdate, ...]) -> None:
        if self._table.deliver(updates):
            self._recovery.progress()
        self.counters.dropped_tokens = self._table.num_dropped_tokens

    def _lose(self) -> None:
        """The engine is dead or as good as: from now on nothing that it says counts."""
        if self._lost:
            return
        self._lost = True
        self.stats = None
        self.cache_branches = ()
        if self.state is EngineState.READY:
            self.state = EngineState.RESTARTING
            self.reason = "the engine is being restarted"
        self.counters.replayed_choices += self._table.lose_engine()
        self._profile.told(b"")
        self._changed.set()

    def _check_watchdog(self) -> None:
        if self._lost:
            return
        loop = asyncio.get_running_loop()
        verdict = self._watchdog.check(loop.time())
        if verdict.stuck is not None:
            logger.error("the engine is stuck: %s", verdict.stuck)
            self._stuck = True
            if self._engine is not None:
                self._engine.dump_stacks()
            self._lose()
            return
        if verdict.ping:
            self.send(Ping(self._life))
        self._timer = loop.call_at(verdict.next_check_at, self._check_watchdog)

    # --- waiting -----------------------------------------------------------------------------------------------------

    async def _while_alive(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition or for close(). Raises _EngineLostError as soon as there is no engine."""
        await self._until(lambda: self._lost or self._closing.is_set() or condition())
        if self._lost:
            raise _EngineLostError

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()
