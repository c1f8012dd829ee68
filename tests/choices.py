"""Requests, and all that is heard of their choices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core.plan import SeqId
from engine.types import FinishReason, GenerationRequest, Pooling, RequestUpdate, SamplingParams, TokenLogprobs


def request(
    request_id: int,
    prompt: Iterable[int] | int,
    max_tokens: int = 16,
    *,
    seed: int = 0,
    n: int = 1,
    choice_index: int = 0,
    outputs: tuple[int, ...] = (),
    stop: tuple[int, ...] = (),
    namespace: int = 0,
    tenant: int = 0,
    priority: int = 0,
    pooling: Pooling | None = None,
    constraint: str | None = None,
    **sampling: object,
) -> GenerationRequest:
    """Greedy unless a temperature is given. A number as the prompt means so many tokens that no other id has."""
    tokens = range(request_id * 100_000, request_id * 100_000 + prompt) if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | sampling))  # type: ignore[arg-type]
    return GenerationRequest(
        request_id,
        tuple(tokens),
        params,
        seed,
        stop_token_ids=stop,
        output_token_ids=outputs,
        choice_index=choice_index,
        n=n,
        cache_namespace=namespace,
        tenant=tenant,
        priority=priority,
        pooling=pooling,
        constraint=constraint,
    )


@dataclass
class Outcome:
    """All that a client has heard of a choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    embedding: tuple[float, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None


class Outcomes(dict[SeqId, Outcome]):
    """By choice. A choice that nobody expected is a KeyError."""

    def expect(self, one: GenerationRequest) -> None:
        """Its choices begin anew."""
        for index in range(one.choice_index, one.choice_index + one.n):
            self[SeqId(one.request_id, index)] = Outcome()

    def hear(self, updates: Iterable[RequestUpdate]) -> None:
        """Take them in; the test fails if a choice that has ended has news."""
        for update in updates:
            outcome = self[SeqId(update.request_id, update.choice_index)]
            assert outcome.finish_reason is None, f"news after the end: {update}"
            outcome.token_ids += update.new_token_ids
            outcome.logprobs += update.logprobs
            outcome.prompt_logprobs += update.prompt_logprobs
            outcome.embedding = update.embedding
            outcome.num_cached_tokens = update.num_cached_tokens
            outcome.finish_reason = update.finish_reason
            outcome.stop_token_id = update.stop_token_id
            outcome.error = update.error
