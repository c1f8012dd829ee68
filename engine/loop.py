"""The engine's loop: drain commands → schedule → execute → update → publish.

`step()` is synchronous and public: a test drives it by hand with a list of commands and a fake executor, no process,
no socket, no torch. One thread; the link and the executor are called from it alone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.constraints.arrivals import Arrivals
from engine.constraints.grammars import GrammarStore
from engine.core.plan import SchedulerOutput, TimedSpan
from engine.core.scheduler import Scheduler
from engine.errors import EngineError, RequestRejected
from engine.executor import Executor, Ticket
from engine.link import Link
from engine.logs import REQUEST
from engine.profile import Profile
from engine.types import ErrorKind, FinishReason, GenerationRequest, RequestUpdate
from engine.wire import (
    Abort,
    CacheBranches,
    Command,
    Configure,
    LookAtCache,
    News,
    Ping,
    Pong,
    Profiled,
    ResetPrefixCache,
    Shutdown,
    StartProfile,
    StepBegun,
    StepDone,
    StopProfile,
    Submit,
    UseVocabulary,
)

logger = logging.getLogger(__name__)


_QUIET_SECONDS = 1.0
_COMPILING_SECONDS = 0.005  # between two looks at the link while nothing runs and a grammar is being compiled
_TIMED_EVERY = 64  # of so many steps one tells how long each of its operations took: waiting for each costs a little


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step between submission and collection."""

    output: SchedulerOutput
    ticket: Ticket
    begun_at: float  # before schedule()
    submitted_at: float  # after schedule()
    gap_seconds: float


class EngineLoop:
    """Runs the scheduler against an executor and tells the server.

    `depth` steps are under way at most: with 2, a step is planned and submitted while the one before runs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        link: Link,
        *,
        depth: int = 1,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarStore | None = None,
    ) -> None:
        """`grammars` is the executor's, if that follows constraints."""
        self._grammars = GrammarStore() if grammars is None else grammars
        self._arrivals = Arrivals(self._grammars)
        self._scheduler = scheduler
        self._executor = executor
        self._link = link
        self._depth = depth
        self._clock = clock
        self._in_flight: deque[_InFlight] = deque()
        self._stopping = False
        self._expert_tokens_total: tuple[int, ...] = ()
        self._profile: Profile | None = None  # while one is taken
        self._publish_seconds = 0.0  # of the latest step
        self._step_ended_at: float | None = None  # the latest one, if there was work left behind it

    @property
    def busy(self) -> bool:
        """Whether step() has something to do without a new command."""
        return bool(self._in_flight) or self._scheduler.has_work()

    @property
    def stopping(self) -> bool:
        """Whether a Shutdown has been taken."""
        return self._stopping

    def run(self) -> None:
        """Step until told to shut down. Raises LinkClosed when the server goes, and whatever ends the engine."""
        while not self._stopping:
            self.step()
            if not self.busy and not self._stopping:
                self._idle()

    def step(self) -> None:
        """One turn: take the commands that have arrived, keep `depth` steps under way, finish the oldest, publish.

        Raises what the executor raises when the engine as a whole cannot go on.
        """
        self._take(self._link.receive(0))
        self._submit_steps()
        if self._in_flight:
            self._finish_step(self._in_flight.popleft())

    def _idle(self) -> None:
        """Wait for commands and take them. After a moment of quiet the books are checked, once: that takes time, and
        must not meet a client who sends one request after another."""
        if self._arrivals.are_waiting:
            self._arrivals.wait(_COMPILING_SECONDS)
            return
        commands = self._link.receive(_QUIET_SECONDS)
        if not commands:
            self._scheduler.check_invariants()
            commands = self._link.receive(None)
        self._take(commands)

    # --- commands ----------------------------------------------------------------------------------------------------

    def _take(self, commands: list[Command]) -> None:
        """Carry out commands in order; what they end is told at once, not after the next step."""
        news: list[RequestUpdate] = []
        changed = False
        for command in commands:
            match command:
                case Submit(request):
                    news += self._receive(request)
                case Abort(request_id, choice_index):
                    news += self._scheduler.abort(request_id, choice_index)
                    self._arrivals.abort(request_id, choice_index)
                case UseVocabulary(vocabulary):
                    self._grammars.use(vocabulary)
                case Ping(number):
                    self._link.send(Pong(number))
                case ResetPrefixCache():
                    self._scheduler.reset_prefix_cache()
                    changed = True
                case LookAtCache(max_branches):
                    self._link.send(CacheBranches(self._scheduler.cache_branches(max_branches)))
                case StartProfile(max_steps):
                    self._profile = Profile(max_steps)
                case StopProfile():
                    self._link.send(Profiled((self._profile or Profile(0)).trace()))
                    self._profile = None
                case Shutdown():
                    self._stopping = True
                case Configure():
                    raise ValueError("the engine is configured already")
        news += self._add_compiled()
        self._forget_grammars(news)
        if news or changed:
            stats = replace(
                self._scheduler.stats(),
                num_prefill_tokens=0,
                num_decode_tokens=0,
                expert_tokens_total=self._expert_tokens_total,
            )
            self._link.send(News(tuple(news), stats))

    def _receive(self, request: GenerationRequest) -> list[RequestUpdate]:
        """A request waits, in nobody's way, until its grammar is compiled."""
        if request.constraint is None:
            return self._add(request)
        self._arrivals.add(request, request.constraint)
        return []

    def _add_compiled(self) -> list[RequestUpdate]:
        """The requests whose grammar has become ready, and what was to be aborted of them."""
        news: list[RequestUpdate] = []
        for arrival in self._arrivals.ready():
            request, refusal = arrival.request, arrival.refusal
            news += self._add(request) if refusal is None else _refusals(request, refusal, ErrorKind.REJECTED)
            for choice_index in arrival.aborted:
                news += self._scheduler.abort(request.request_id, choice_index)
        return news

    def _forget_grammars(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            if update.finish_reason is not None and not self._scheduler.is_live(update.request_id):
                self._arrivals.forget(update.request_id)

    def _add(self, request: GenerationRequest) -> list[RequestUpdate]:
        """A request that cannot be taken ends here, alone: refused, or failed if the fault is ours."""
        try:
            self._scheduler.add(request)
        except RequestRejected as error:
            return _refusals(request, str(error), ErrorKind.REJECTED)
        except Exception:
            about = {REQUEST: request.request_id}
            logger.exception("add() failed on request %d", request.request_id, extra=about)
            self._scheduler.check_invariants()  # if it left the books wrong, the engine has to go
            return _refusals(request, "the engine failed to take the request", ErrorKind.INTERNAL)
        return []

    # --- steps -------------------------------------------------------------------------------------------------------

    def _submit_steps(self) -> None:
        while len(self._in_flight) < self._depth and self._scheduler.has_work():
            begun_at = self._clock()
            output = self._scheduler.schedule()
            submitted_at = self._clock()
            if not output.seqs:  # all that is live hangs on the steps under way
                if not self._in_flight:
                    raise EngineError("the scheduler has work and plans nothing")
                break
            self._link.send(_announce(output))
            timed = output.step_id % _TIMED_EVERY == 0 or (self._profile is not None and not self._profile.full)
            ticket = self._executor.submit(output, timed=timed)
            self._in_flight.append(_InFlight(output, ticket, begun_at, submitted_at, self._gap(begun_at)))

    def _gap(self, begun_at: float) -> float:
        """How long the executor had nothing to do although there was work."""
        if self._in_flight or self._step_ended_at is None:
            return 0.0
        return begun_at - self._step_ended_at

    def _finish_step(self, step: _InFlight) -> None:
        result = self._executor.collect(step.ticket)
        collected_at = self._clock()
        self._expert_tokens_total, times = result.expert_tokens_total, result.times
        updates = self._scheduler.update(step.output, result)
        self._forget_grammars(updates)
        updated_at = self._clock()
        stats = replace(
            self._scheduler.stats(),
            step_id=step.output.step_id,
            started_at=step.begun_at,
            schedule_seconds=step.submitted_at - step.begun_at,
            execute_seconds=collected_at - step.submitted_at,
            forward_seconds=0.0 if times is None else times.forward_end - times.forward_begin,
            sample_seconds=0.0 if times is None else times.sample_end - times.forward_end,
            kernel_seconds=() if times is None else _by_operation(times.operations),
            update_seconds=updated_at - collected_at,
            publish_seconds=self._publish_seconds,
            gap_seconds=step.gap_seconds,
            expert_tokens_total=self._expert_tokens_total,
        )
        self._link.send(StepDone(tuple(updates), stats))
        ended_at = self._clock()
        self._publish_seconds = ended_at - updated_at
        self._step_ended_at = ended_at if self.busy else None
        if self._profile is not None:
            self._profile.add(stats, times, len(step.output.seqs), ended_at)


def _announce(output: SchedulerOutput) -> StepBegun:
    """What a step is about to do."""
    seqs = output.seqs
    return StepBegun(
        output.step_id,
        tuple([seq.seq_id for seq in seqs]),
        tuple([len(seq.token_ids) for seq in seqs]),
        admitted=tuple([seq.seq_id for seq in seqs if seq.record is not None]),
        forgotten=output.forget,
        blocks_copied=len(output.block_copies),
        blocks_swapped_out=len(output.swap_out),
        blocks_swapped_in=len(output.swap_in),
    )


def _by_operation(spans: tuple[TimedSpan, ...]) -> tuple[tuple[str, float], ...]:
    """(name, seconds), each name once."""
    seconds: dict[str, float] = {}
    for name, begin, end in spans:
        seconds[name] = seconds.get(name, 0.0) + end - begin
    return tuple(seconds.items())


def _refusals(request: GenerationRequest, message: str, kind: ErrorKind) -> list[RequestUpdate]:
    """The terminal updates of a request that was not taken."""
    choices = range(request.choice_index, request.choice_index + request.n)
    return [
        RequestUpdate(request.request_id, k, finish_reason=FinishReason.ERROR, error=message, error_kind=kind)
        for k in choices
    ]
