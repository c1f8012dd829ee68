"""What is sent, and what one request showed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from loadtest.workloads import Manners


@dataclass(frozen=True, slots=True)
class Request:
    """One request to be sent. `messages` are (role, text); a completion gets the texts joined."""

    label: str  # its class in the workload
    session: int
    turn: int
    messages: tuple[tuple[str, str], ...]
    max_tokens: int
    prompt_tokens: int  # as planned; the server's count replaces it
    manners: Manners = Manners.NORMAL
    body: dict[str, Any] = field(default_factory=dict)  # its own fields, over those that all requests have
    api_key: str = ""  # instead of the target's


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it. All times are seconds on the run's clock.

    Latencies count from `scheduled_at`, when the load wanted the request sent, not from when the client came
    to send it: a stall delays what is behind it, and that delay belongs to the server under test.
    """

    request: Request
    scheduled_at: float
    sent_at: float
    ended_at: float
    token_times: tuple[float, ...] = ()  # arrival of each chunk that carried text
    prompt_tokens: int | None = None  # as the server counts (usage)
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    status: int | None = None  # HTTP status, if any answer came
    finish_reason: str | None = None
    error: str | None = None  # kind of failure: see client.py
    detail: str = ""  # the failure in the server's or the system's words
    text: str = ""

    @property
    def ok(self) -> bool:
        """The request did what its manners ask: a misbehaving one that was refused has done well."""
        return self.error is None

    @property
    def served(self) -> bool:
        """A well-behaved request that was answered to its end: what latencies are taken from."""
        return self.error is None and self.request.manners is Manners.NORMAL

    @property
    def ttft_seconds(self) -> float | None:
        """Scheduled until the first text."""
        return self.token_times[0] - self.scheduled_at if self.token_times else None

    @property
    def e2e_seconds(self) -> float:
        """Scheduled until the end (of the answer, or of waiting for it)."""
        return self.ended_at - self.scheduled_at

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between successive chunks of text, as a reader feels them."""
        times = self.token_times
        return tuple(later - earlier for earlier, later in itertools.pairwise(times))

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced: the server's count, else the number of chunks."""
        return len(self.token_times) if self.completion_tokens is None else self.completion_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt: the server's count, else as planned."""
        return self.request.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens

    @property
    def tpot_seconds(self) -> float | None:
        """Mean seconds per output token after the first."""
        if len(self.token_times) < 2 or self.num_output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1)
