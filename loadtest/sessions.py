"""Turns a workload, a seed and a prompt maker into the sessions that a run sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from loadtest.prompts import PromptMaker
from loadtest.records import Request
from loadtest.trace import Arrival
from loadtest.workloads import Manners, RequestClass, Workload, sample


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn adds to the conversation, and how much it asks for."""

    text: str
    prompt_tokens: int  # of this turn alone
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation, usually of one turn."""

    index: int
    label: str
    prefix: str  # shared with other sessions; "" = none
    prefix_tokens: int
    turns: tuple[Turn, ...]
    think_seconds: float = 0.0
    manners: Manners = Manners.NORMAL
    body: dict[str, Any] = field(default_factory=dict)
    api_key: str = ""

    def request(self, turn: int, answers: Sequence[str]) -> Request:
        """The request of the given turn, with the answers to the turns before it as history."""
        messages = [("system", self.prefix)] if self.prefix else []
        for earlier, answer in zip(self.turns[:turn], answers, strict=True):
            messages += [("user", earlier.text), ("assistant", answer)]
        messages.append(("user", self.turns[turn].text))
        history_tokens = sum(earlier.prompt_tokens + earlier.max_tokens for earlier in self.turns[:turn])
        return Request(
            label=self.label,
            session=self.index,
            turn=turn,
            messages=tuple(messages),
            max_tokens=self.turns[turn].max_tokens,
            prompt_tokens=self.prefix_tokens + history_tokens + self.turns[turn].prompt_tokens,
            manners=self.manners,
            body=self.body,
            api_key=self.api_key,
        )


def build_sessions(workload: Workload, num_sessions: int, seed: int, maker: PromptMaker) -> list[Session]:
    """The workload's sessions in the order of sending; the same for the same arguments.

    Classes with a count come first, then the rest is drawn by weight. Shared prefixes depend on the seed too, so
    that a repetition with another seed meets a cold prefix cache.
    """
    rng = Random(f"{workload.name}/{seed}")
    prefixes = {
        request_class.name: [maker.text(request_class.shared, rng) for _ in range(request_class.groups)]
        for request_class in workload.classes
        if request_class.shared
    }
    return [
        _build_session(index, request_class, prefixes.get(request_class.name, [""]), rng, maker)
        for index, request_class in enumerate(_order(workload, num_sessions, rng))
    ]


def replayed_sessions(arrivals: Sequence[Arrival], seed: int, maker: PromptMaker) -> list[Session]:
    """One single-turn session per recorded arrival, with its lengths."""
    rng = Random(f"replay/{seed}")
    return [
        Session(
            index=index,
            label="replayed",
            prefix="",
            prefix_tokens=0,
            turns=(Turn(maker.text(arrival.prompt_tokens, rng), arrival.prompt_tokens, arrival.output_tokens),),
        )
        for index, arrival in enumerate(arrivals)
    ]


def _order(workload: Workload, num_sessions: int, rng: Random) -> list[RequestClass]:
    counted = [c for c in workload.classes for _ in range(c.count)][:num_sessions]
    drawn = [c for c in workload.classes if not c.count]
    if not drawn:
        return counted
    return counted + rng.choices(drawn, [c.weight for c in drawn], k=num_sessions - len(counted))


def _build_session(
    index: int, request_class: RequestClass, prefixes: list[str], rng: Random, maker: PromptMaker
) -> Session:
    prefix = rng.choice(prefixes)
    turns = []
    for turn in range(sample(request_class.turns, rng)):
        prompt_tokens, max_tokens = sample(request_class.prompt, rng), sample(request_class.output, rng)
        if prefix and turn == 0:
            whole = maker.extend(prefix, request_class.shared + prompt_tokens, rng)
            text = whole[len(prefix) + 1 :]
        else:
            text = maker.text(prompt_tokens, rng)
        turns.append(Turn(text, prompt_tokens, max_tokens))
    return Session(
        index=index,
        label=request_class.name,
        prefix=prefix,
        prefix_tokens=request_class.shared,
        turns=tuple(turns),
        think_seconds=request_class.think_seconds,
        manners=request_class.manners,
        body=request_class.body,
        api_key=request_class.api_key,
    )
