"""What every accepted choice has received so far: enough to carry it over to another engine process.

The table knows nothing of processes and sockets. It guards one promise: each accepted choice gets exactly one terminal
update, whatever the engine sends, repeats or fails to send.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core.plan import SeqId
from engine.types import ErrorKind, FinishReason, GenerationRequest, RequestUpdate

SUSPECT_DEATHS = 2  # engines that died under a choice, without progress of its own between, until it must run alone


@dataclass(slots=True, eq=False)
class Choice:
    """One choice and its part of the conversation."""

    seq_id: SeqId
    output_token_ids: list[int]
    num_prompt_logprobs: int = 0  # positions delivered
    num_prompt_logprobs_again: int = 0  # positions that the running engine will tell once more
    num_cached_tokens: int | None = None  # of the first admission; None = no update yet
    submitted: bool = False  # the running engine has it
    replayed: bool = False  # an engine has had it before
    parking: bool = False  # taken back from the engine: its abort is not the end
    aborted: bool = False  # the client wants its end
    finished: bool = False
    deaths: int = 0  # engines that died while running it since its last progress


class Entry:
    """One accepted request: its choices, and the updates that its consumer has not taken yet.

    The buffer is bounded by the request itself: at most n × (max_tokens + 1) updates, beside those for its prompt.
    """

    __slots__ = ("_waiter", "accepted_at", "begun_at", "choices", "num_unfinished", "pending", "request", "untouched")

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.accepted_at = time.monotonic()
        self.begun_at: float | None = None  # when an engine first ran some of it
        self.choices = {
            index: Choice(SeqId(request.request_id, index), list(request.output_token_ids))
            for index in range(request.choice_index, request.choice_index + request.n)
        }
        self.num_unfinished = request.n
        self.pending: list[RequestUpdate] = []
        self.untouched = True  # no update yet: the request can be sent again as it came
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    def wake(self) -> None:
        """Let the consumer look; never blocks."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return once there is an update to take or none will come. One consumer at a time."""
        while not self.pending and not self.finished:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def replay(self, choice: Choice) -> GenerationRequest:
        """The record that makes an engine go on where this choice stands; its updates must then be reconciled."""
        sampling = self.request.sampling
        choice.num_prompt_logprobs_again = choice.num_prompt_logprobs
        if choice.num_prompt_logprobs >= len(self.request.prompt_token_ids):  # told in full
            sampling = replace(sampling, prompt_logprobs=None)
            choice.num_prompt_logprobs_again = 0
        return replace(
            self.request,
            sampling=sampling,
            output_token_ids=tuple(choice.output_token_ids),
            choice_index=choice.seq_id.choice_index,
            n=1,
        )


@dataclass(slots=True)
class InFlight:
    """The table of accepted requests with unfinished choices, in order of acceptance."""

    num_dropped_tokens: int = 0  # that came for choices which had ended here, or whose consumer had gone
    _entries: dict[int, Entry] = field(default_factory=dict)
    _empty: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._empty.set()

    def __len__(self) -> int:
        return len(self._entries)

    async def wait_empty(self) -> None:
        await self._empty.wait()

    def get(self, request_id: int) -> Entry | None:
        return self._entries.get(request_id)

    def add(self, request: GenerationRequest) -> Entry:
        """Accept a request. Raises ValueError if the id is in use."""
        if request.request_id in self._entries:
            raise ValueError(f"request id {request.request_id} is in use")
        entry = self._entries[request.request_id] = Entry(request)
        self._empty.clear()
        return entry

    def drop(self, entry: Entry) -> bool:
        """Forget a request whose consumer has gone; whether the running engine still has some of it."""
        self.num_dropped_tokens += sum(len(update.new_token_ids) for update in entry.pending)
        entry.pending.clear()
        if self._entries.pop(entry.request.request_id, None) is None:
            return False
        running = any(choice.submitted and not choice.finished for choice in entry.choices.values())
        for choice in entry.choices.values():
            choice.finished = True
        entry.num_unfinished = 0
        self._note_empty()
        return running

    def note_begun(self, seq_ids: Iterable[SeqId]) -> None:
        """A step runs these: the wait is over for those that have not run yet."""
        now = time.monotonic()
        for request_id, _ in seq_ids:
            entry = self._entries.get(request_id)
            if entry is not None and entry.begun_at is None:
                entry.begun_at = now

    def longest_wait_seconds(self) -> float:
        """Of the oldest request that no engine has run yet; 0 if there is none."""
        oldest = next((entry for entry in self._entries.values() if entry.begun_at is None), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.accepted_at

    def records(self) -> list[dict[str, Any]]:
        """The open requests in numbers, oldest first: JSON."""
        return [
            {
                "request_id": entry.request.request_id,
                "tenant": entry.request.tenant,
                "priority": entry.request.priority,
                "prompt_tokens": len(entry.request.prompt_token_ids),
                "max_tokens": entry.request.sampling.max_tokens,
                "choices": [
                    {
                        "index": choice.seq_id.choice_index,
                        "output_tokens": len(choice.output_token_ids),
                        "in_engine": choice.submitted,
                        "replayed": choice.replayed,
                        "aborted": choice.aborted,
                        "finished": choice.finished,
                        "deaths": choice.deaths,
                    }
                    for choice in entry.choices.values()
                ],
            }
            for entry in self._entries.values()
        ]

    # --- news --------------------------------------------------------------------------------------------------------

    def deliver(self, updates: Iterable[RequestUpdate]) -> bool:
        """Hand updates to their consumers; whether any choice has got further."""
        progress = False
        for update in updates:
            entry = self._entries.get(update.request_id)
            if entry is None:  # its consumer has gone
                self.num_dropped_tokens += len(update.new_token_ids)
                continue
            choice = entry.choices[update.choice_index]
            if choice.finished:
                self.num_dropped_tokens += len(update.new_token_ids)
                continue
            if choice.replayed or choice.parking:
                update = _reconcile(choice, update)
            if choice.num_cached_tokens is None:
                choice.num_cached_tokens = update.num_cached_tokens
            if update.new_token_ids or update.prompt_logprobs:
                choice.output_token_ids += update.new_token_ids
                choice.num_prompt_logprobs += len(update.prompt_logprobs)
                choice.deaths = 0
                progress = True
            entry.untouched = False
            entry.pending.append(update)
            if update.finish_reason is not None:
                progress = progress or update.finish_reason is not FinishReason.ERROR
                self._end(entry, choice)
            entry.wake()
        return progress

    def finish(
        self,
        seq_id: SeqId,
        reason: FinishReason,
        error: str | None = None,
        error_kind: ErrorKind = ErrorKind.INTERNAL,
    ) -> bool:
        """End one choice here, without the engine; False, and nothing happens, if it has ended."""
        entry = self._entries.get(seq_id.request_id)
        if entry is None or entry.choices[seq_id.choice_index].finished:
            return False
        self.deliver([RequestUpdate(*seq_id, finish_reason=reason, error=error, error_kind=error_kind)])
        return True

    def fail_all(self, error: str) -> int:
        """End everything with one clear error each; how many choices that were."""
        seq_ids = [choice.seq_id for _, choice in self._unfinished()]
        for seq_id in seq_ids:
            self.finish(seq_id, FinishReason.ERROR, error, ErrorKind.UNAVAILABLE)
        return len(seq_ids)

    def _end(self, entry: Entry, choice: Choice) -> None:
        choice.finished = True
        entry.num_unfinished -= 1
        if entry.finished:
            del self._entries[entry.request.request_id]
            self._note_empty()

    def _note_empty(self) -> None:
        if not self._entries:
            self._empty.set()

    # --- another engine ----------------------------------------------------------------------------------------------

    def lose_engine(self) -> int:
        """The running engine has gone: all that it had waits for the next one, but for choices whose end was asked
        for. Returns how many choices it had."""
        lost = [choice for _, choice in self._unfinished() if choice.submitted]
        for choice in lost:
            choice.submitted = choice.parking = False
            choice.replayed = True
            if choice.aborted:
                self.finish(choice.seq_id, FinishReason.ABORT)
        return len(lost)

    def blame(self, seq_ids: Iterable[SeqId]) -> None:
        """These were in the step during which the engine died."""
        for request_id, choice_index in seq_ids:
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.choices[choice_index].deaths += 1

    def suspects(self) -> list[tuple[Entry, Choice]]:
        """Choices that must show alone that they do not kill the engine."""
        return [(entry, choice) for entry, choice in self._unfinished() if choice.deaths >= SUSPECT_DEATHS]

    def take(self, entry: Entry) -> list[GenerationRequest]:
        """Records of what the running engine does not have of a request; from now on it counts as submitted."""
        waiting = [choice for choice in entry.choices.values() if not choice.finished and not choice.submitted]
        for choice in waiting:
            choice.submitted = True
        if entry.untouched and len(waiting) == entry.request.n:
            return [entry.request]
        return [entry.replay(choice) for choice in waiting]

    def take_all(self) -> list[GenerationRequest]:
        """`take` for all requests, oldest first."""
        return [request for entry in self._entries.values() for request in self.take(entry)]

    def _unfinished(self) -> list[tuple[Entry, Choice]]:
        entries = list(self._entries.values())
        return [(entry, choice) for entry in entries for choice in entry.choices.values() if not choice.finished]


def _reconcile(choice: Choice, update: RequestUpdate) -> RequestUpdate:
    """Make an update of a replayed or parked choice continue what has been delivered: the prefix hit of the first
    admission stays, prompt positions are not told twice, and an abort that only parks the choice is not its end."""
    again = min(choice.num_prompt_logprobs_again, len(update.prompt_logprobs))
    choice.num_prompt_logprobs_again -= again
    finish_reason = update.finish_reason
    if choice.parking and not choice.aborted and finish_reason is FinishReason.ABORT:
        choice.parking = choice.submitted = False
        choice.replayed = True
        finish_reason = None
    return replace(
        update,
        prompt_logprobs=update.prompt_logprobs[again:],
        num_cached_tokens=update.num_cached_tokens if choice.num_cached_tokens is None else choice.num_cached_tokens,
        finish_reason=finish_reason,
    )
