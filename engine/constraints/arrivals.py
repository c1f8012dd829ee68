"""Requests wait here, outside of every queue, until their grammar is compiled."""

from __future__ import annotations

from concurrent import futures
from dataclasses import dataclass, field

from engine.constraints.grammars import CompiledGrammar, GrammarStore
from engine.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, its grammar, and the choices that were aborted meanwhile (None stands for all)."""

    request: GenerationRequest
    grammar: CompiledGrammar
    aborted: list[int | None] = field(default_factory=list)

    @property
    def refusal(self) -> str | None:
        """Why the request cannot be taken; None if it can."""
        error = self.grammar.exception()
        return None if error is None else str(error)


class Arrivals:
    """One thread. Grammars of requests that have gone on are held until forget(), so that a sequence that comes
    back finds its own compiled."""

    def __init__(self, grammars: GrammarStore) -> None:
        self._grammars = grammars
        self._waiting: list[Arrival] = []
        self._held: dict[int, CompiledGrammar] = {}  # by request id

    @property
    def are_waiting(self) -> bool:
        """Whether some request has not been handed on."""
        return bool(self._waiting)

    def add(self, request: GenerationRequest, grammar: str) -> None:
        """Begin to compile; ready() will hand the request on."""
        self._waiting.append(Arrival(request, self._grammars.compile(grammar)))

    def abort(self, request_id: int, choice_index: int | None) -> None:
        """Remember an abort for when the request is handed on."""
        for arrival in self._waiting:
            request = arrival.request
            choices = range(request.choice_index, request.choice_index + request.n)
            if request.request_id == request_id and (choice_index is None or choice_index in choices):
                arrival.aborted.append(choice_index)

    def ready(self) -> list[Arrival]:
        """Those whose grammar is compiled, or refused, in order of arrival; each once."""
        ready = [arrival for arrival in self._waiting if arrival.grammar.done()]
        if ready:
            self._waiting = [arrival for arrival in self._waiting if arrival not in ready]
            self._held |= {arrival.request.request_id: arrival.grammar for arrival in ready}
        return ready

    def wait(self, timeout_seconds: float) -> None:
        """Until one is ready, or the time is over."""
        grammars = [arrival.grammar for arrival in self._waiting]
        futures.wait(grammars, timeout_seconds, return_when=futures.FIRST_COMPLETED)

    def forget(self, request_id: int) -> None:
        """Let go of a request's grammar: it has ended."""
        self._held.pop(request_id, None)
