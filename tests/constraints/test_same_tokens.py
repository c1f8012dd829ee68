"""A constrained request gives the same tokens whatever stands beside it and however it is computed."""

from __future__ import annotations

import json
from collections.abc import Callable

import jsonschema
import pytest

from engine.core.plan import SeqId
from engine.types import FinishReason, GenerationRequest
from server.text.tokenizer import Tokenizer
from tests.choices import request
from tests.constraints.conftest import PERSON, QUESTION, by_schema
from tests.runner.harness import Harness

Make = Callable[..., Harness]
Ask = Callable[[str], list[int]]

TEMPERATURES = (0.0, 0.8, 1.2)


@pytest.fixture(scope="module")
def requests(ask: Ask, tokenizer: Tokenizer) -> list[GenerationRequest]:
    return [constrained(k, ask, tokenizer, temperature=t) for k, t in enumerate(TEMPERATURES)]


def constrained(request_id: int, ask: Ask, tokenizer: Tokenizer, **options: object) -> GenerationRequest:
    fields: dict[str, object] = {"seed": 7, "max_tokens": 96, "stop": tokenizer.eos_token_ids}
    return request(request_id, ask(QUESTION), constraint=by_schema(PERSON), **(fields | options))  # type: ignore[arg-type]


def free(request_id: int, ask: Ask, **options: object) -> GenerationRequest:
    return request(request_id, ask("Tell me a story."), 40, temperature=0.9, seed=request_id, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(make: Make, requests: list[GenerationRequest], tokenizer: Tokenizer) -> list[list[int]]:
    """Each with nothing else, every token computed by itself."""
    tokens = []
    for one in requests:
        outcome = make(prefix_cache=False, fast_forward=False).run(one)[SeqId(one.request_id, 0)]
        assert outcome.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(tokenizer.decode(outcome.token_ids, skip_special_tokens=False)), PERSON)
        tokens.append(outcome.token_ids)
    return tokens


@pytest.mark.parametrize("fast_forward", [False, True])
def test_beside_free_ones_that_come_and_go(
    make: Make, requests: list[GenerationRequest], alone: list[list[int]], ask: Ask, fast_forward: bool
) -> None:
    """And the free ones give what they give alone."""
    neighbours = [free(k, ask) for k in (10, 11, 12)]
    undisturbed = [make(prefix_cache=False).tokens(one)[0] for one in neighbours]
    harness = make(budget=64, fast_forward=fast_forward)
    harness.add(neighbours[0])

    def arrivals(step: int) -> None:
        if step == 2:
            harness.add(*requests)
        if step in (5, 9):
            harness.add(neighbours[1 if step == 5 else 2])

    outcomes = harness.run(before_step=arrivals)
    assert [outcomes[SeqId(one.request_id, 0)].token_ids for one in requests] == alone
    assert [outcomes[SeqId(one.request_id, 0)].token_ids for one in neighbours] == undisturbed


def test_fast_forward_takes_fewer_steps_and_a_warm_cache_changes_nothing(
    make: Make, requests: list[GenerationRequest], alone: list[list[int]]
) -> None:
    harness = make(block_size=4)
    assert harness.tokens(requests[0]) == alone[:1]
    num_steps = harness.scheduler.stats().step_id
    assert num_steps < 0.7 * len(alone[0])
    assert harness.tokens(requests[1]) == alone[1:2]
    assert harness.outcomes[SeqId(1, 0)].num_cached_tokens > 0


@pytest.mark.parametrize("fast_forward", [False, True])
@pytest.mark.parametrize("host_blocks", [0, 64])
def test_preempted(
    make: Make,
    requests: list[GenerationRequest],
    alone: list[list[int]],
    ask: Ask,
    fast_forward: bool,
    host_blocks: int,
) -> None:
    """All of them together need more blocks than there are: some are computed anew, or come back from the host."""
    longest = len(requests[0].prompt_token_ids) + requests[0].sampling.max_tokens
    harness = make(
        block_size=4,
        num_blocks=longest // 4 + 2,
        fast_forward=fast_forward,
        prefix_cache=False,
        host_blocks=host_blocks,
        preemption="swap" if host_blocks else "recompute",
    )
    assert harness.tokens(*requests, free(10, ask))[:3] == alone
    stats = harness.scheduler.stats()
    assert stats.preemptions_total > 0
    assert (stats.parked_total > 0) == (host_blocks > 0)


@pytest.mark.parametrize("fast_forward", [False, True])
def test_replayed_from_every_output(
    make: Make, requests: list[GenerationRequest], alone: list[list[int]], tokenizer: Tokenizer, ask: Ask,
    fast_forward: bool,
) -> None:  # fmt: skip
    """As after the engine's death: what was sent comes along as outputs."""
    sampled = alone[1]
    known = range(1, len(sampled), 3)
    again = [constrained(k, ask, tokenizer, temperature=TEMPERATURES[1], outputs=tuple(sampled[:k])) for k in known]
    assert make(fast_forward=fast_forward).tokens(*again) == [sampled[k:] for k in known]


@pytest.mark.parametrize("fast_forward", [False, True])
def test_choices_equal_each_alone(make: Make, ask: Ask, tokenizer: Tokenizer, fast_forward: bool) -> None:
    solo = [
        make(fast_forward=False).tokens(constrained(k, ask, tokenizer, temperature=1.0, choice_index=k))[0]
        for k in range(3)
    ]
    outcomes = make(fast_forward=fast_forward).run(constrained(9, ask, tokenizer, temperature=1.0, n=3))
    assert [outcomes[SeqId(9, k)].token_ids for k in range(3)] == solo
    assert len({tuple(tokens) for tokens in solo}) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 1.0, "top_k": 5, "min_p": 0.05},
        {"temperature": 1.0, "top_p": 0.7, "logit_bias": ((28, 3.0),)},
        {"max_tokens": 9},
        {"max_tokens": 23},
        {"prompt_logprobs": 0},
    ],
    ids=lambda options: "+".join(options),
)
def test_fast_forward_gives_the_same_with(
    make: Make, ask: Ask, tokenizer: Tokenizer, options: dict[str, object]
) -> None:
    one = constrained(0, ask, tokenizer, **options)
    computed, forwarded = (make(fast_forward=on).run(one)[SeqId(0, 0)] for on in (False, True))
    assert forwarded == computed
    if "max_tokens" in options:
        assert len(computed.token_ids) == options["max_tokens"]
        assert computed.finish_reason is FinishReason.LENGTH


def test_logprobs_are_those_of_the_raw_logits_one_per_token(
    make: Make, requests: list[GenerationRequest], alone: list[list[int]], ask: Ask, tokenizer: Tokenizer
) -> None:
    """The likeliest token is told although the grammar forbids it; nothing is taken without being computed."""
    outcome = make().run(constrained(0, ask, tokenizer, logprobs=2))[SeqId(0, 0)]
    assert outcome.token_ids == alone[0]
    assert [report.token_id for report in outcome.logprobs] == alone[0]
    assert any(report.rank > 1 for report in outcome.logprobs)


def test_stop_tokens_end_it_within_what_is_forced(
    make: Make, alone: list[list[int]], ask: Ask, tokenizer: Tokenizer
) -> None:
    """The request's own stop token stands in the middle of the text."""
    stop = next(token for token in alone[0] if "experience" in tokenizer.token_text(token))
    one = constrained(0, ask, tokenizer, stop=(stop,))
    for fast_forward in (False, True):
        outcome = make(fast_forward=fast_forward).run(one)[SeqId(0, 0)]
        assert outcome.token_ids == alone[0][: alone[0].index(stop) + 1]
        assert (outcome.finish_reason, outcome.stop_token_id) == (FinishReason.STOP, stop)
