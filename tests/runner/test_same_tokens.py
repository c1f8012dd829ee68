"""The same request gives the same tokens whatever stands beside it and however it is computed.

Two requests, one greedy and one sampled, first alone; then in every other circumstance. The reference kernels hold this
up to rounding, so the margin of every choice is asserted to be far above it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from engine.core.plan import SeqId
from engine.models.decoder import Decoder
from engine.types import GenerationRequest, TokenLogprobs
from kernels.interface import KernelSet
from tests.choices import request
from tests.kernels.sampling_cases import noise
from tests.runner.harness import Harness
from tests.runner.prompts import CHINESE, EMOJI, PARAGRAPH, PROSE, PYTHON

Encode = Callable[[str], list[int]]

NUM_TOKENS = 12
TEMPERATURE, TOP_K, SEED = 0.9, 20, 0x1234_5678_9ABC_DEF0
MIN_MARGIN = 1e-3


@pytest.fixture(scope="module")
def prompts(encode: Encode) -> tuple[list[int], list[int]]:
    """Each ends four tokens before the end of a block."""
    return encode(PARAGRAPH + PROSE)[:76], encode(PROSE + PYTHON)[:60]


@pytest.fixture(scope="module")
def make(default_model: Decoder, kernels: KernelSet) -> Callable[..., Harness]:
    return lambda **options: Harness(default_model, kernels, **options)


def targets(
    prompts: tuple[list[int], list[int]], first_id: int = 0, outputs: tuple[list[int], list[int]] = ([], [])
) -> tuple[GenerationRequest, GenerationRequest]:
    greedy = request(first_id, prompts[0], NUM_TOKENS, logprobs=2, outputs=tuple(outputs[0]))
    return greedy, sampled_request(first_id + 1, prompts[1], outputs=tuple(outputs[1]))


def sampled_request(request_id: int, prompt: list[int], **options: object) -> GenerationRequest:
    fields: dict[str, object] = {"seed": SEED, "temperature": TEMPERATURE, "top_k": TOP_K, "logprobs": TOP_K}
    return request(request_id, prompt, NUM_TOKENS, **(fields | options))  # type: ignore[arg-type]


def assert_greedy_margins(reports: list[TokenLogprobs]) -> None:
    assert min(report.top[0][1] - report.top[1][1] for report in reports) > MIN_MARGIN


def assert_sampled_margins(reports: list[TokenLogprobs], choice_index: int = 0) -> None:
    """By how much the winner's logit and noise beat the second's."""
    for position, report in enumerate(reports):
        scores = [value / TEMPERATURE + noise(token, SEED, position, choice_index) for token, value in report.top]
        second, first = np.sort(scores)[-2:]
        assert first - second > MIN_MARGIN


@pytest.fixture(scope="module")
def alone(make: Callable[..., Harness], prompts: tuple[list[int], list[int]]) -> list[list[int]]:
    """The two outputs, each computed with nothing else, its prompt in one piece."""
    tokens = []
    for one, check in zip(targets(prompts), (assert_greedy_margins, assert_sampled_margins), strict=True):
        outcome = make(prefix_cache=False).run(one)[SeqId(one.request_id, 0)]
        check(outcome.logprobs)
        assert len(outcome.token_ids) == NUM_TOKENS
        tokens.append(outcome.token_ids)
    return tokens


def test_in_a_busy_batch(
    make: Callable[..., Harness], prompts: tuple[list[int], list[int]], alone: list[list[int]], encode: Encode
) -> None:
    """Others come before and after, with long prompts in chunks, and leave at different steps."""
    others = [
        request(10, encode(CHINESE), 3),
        request(11, encode(PARAGRAPH * 2), 8, temperature=1.3, seed=5),
        request(12, encode(EMOJI), 20, repetition_penalty=1.3, presence_penalty=0.5),
        request(13, prompts[0][:50], 5, logprobs=3, min_tokens=2, stop=(2,)),
    ]
    harness = make(budget=128)
    harness.add(*others[:2])
    mine = targets(prompts)

    def arrivals(step: int) -> None:
        if step == 1:
            harness.add(*mine)
        if step in (3, 5):
            harness.add(others[2 if step == 3 else 3])

    outcomes = harness.run(before_step=arrivals)
    assert [outcomes[SeqId(one.request_id, 0)].token_ids for one in mine] == alone


def test_with_a_warm_cache(
    make: Callable[..., Harness], prompts: tuple[list[int], list[int]], alone: list[list[int]]
) -> None:
    harness = make()
    assert harness.tokens(*targets(prompts)) == alone
    assert harness.tokens(*targets(prompts, first_id=2)) == alone
    for request_id, prompt in zip((2, 3), prompts, strict=True):
        assert harness.outcomes[SeqId(request_id, 0)].num_cached_tokens == len(prompt) // 16 * 16


@pytest.mark.parametrize("budget", [16, 64, 512, 8192])
def test_with_every_budget(
    make: Callable[..., Harness], prompts: tuple[list[int], list[int]], alone: list[list[int]], budget: int
) -> None:
    assert make(budget=budget, max_num_seqs=16).tokens(*targets(prompts)) == alone


def test_after_preemption(
    make: Callable[..., Harness], prompts: tuple[list[int], list[int]], alone: list[list[int]]
) -> None:
    """A pool in which each of the two can grow by one block and needs three: the last admitted gives way."""
    harness = make(block_size=4, num_blocks=76 // 4 + 60 // 4 + 2)
    assert harness.tokens(*targets(prompts)) == alone
    assert harness.scheduler.stats().preemptions_total == 1


@pytest.mark.parametrize("known", [1, 7])
def test_replayed_with_outputs(
    make: Callable[..., Harness], prompts: tuple[list[int], list[int]], alone: list[list[int]], known: int
) -> None:
    """As after the engine's death: what was sent comes along as outputs, the rest is the same."""
    mine = targets(prompts, outputs=(alone[0][:known], alone[1][:known]))
    assert make().tokens(*mine) == [tokens[known:] for tokens in alone]


@pytest.fixture(scope="module")
def solo_choices(make: Callable[..., Harness], prompts: tuple[list[int], list[int]]) -> list[list[int]]:
    """Eight choices as requests of their own, nothing shared."""
    harness = make(prefix_cache=False)
    solos = [sampled_request(k, prompts[1], choice_index=k) for k in range(8)]
    tokens = harness.tokens(*solos)
    for k in range(8):
        assert_sampled_margins(harness.outcomes[SeqId(k, k)].logprobs, choice_index=k)
    return tokens


@pytest.mark.parametrize("n", [2, 3, 8])
def test_choices_of_one_request_equal_each_alone(
    make: Callable[..., Harness], prompts: tuple[list[int], list[int]], solo_choices: list[list[int]], n: int
) -> None:
    outcomes = make().run(sampled_request(0, prompts[1], n=n))
    assert [outcomes[SeqId(0, k)].token_ids for k in range(n)] == solo_choices[:n]
    assert all(one != other for one, other in pairwise(solo_choices[:n]))


def test_choices_stay_the_same_when_one_is_aborted(
    make: Callable[..., Harness], prompts: tuple[list[int], list[int]], solo_choices: list[list[int]]
) -> None:
    """The choice that writes in place goes while the others hold copies of its block."""
    harness = make()

    def abort(step: int) -> None:
        if step == 4:
            harness.outcomes.hear(harness.scheduler.abort(0, 0))

    outcomes = harness.run(sampled_request(0, prompts[1], n=3), before_step=abort)
    assert len(outcomes[SeqId(0, 0)].token_ids) < NUM_TOKENS
    assert [outcomes[SeqId(0, k)].token_ids for k in (1, 2)] == solo_choices[1:3]


def test_the_choice_of_a_greedy_request_does_not_matter(
    make: Callable[..., Harness], prompts: tuple[list[int], list[int]], alone: list[list[int]]
) -> None:
    outcomes = make().run(request(0, prompts[0], NUM_TOKENS, n=2))
    assert [outcomes[SeqId(0, k)].token_ids for k in (0, 1)] == [alone[0], alone[0]]
