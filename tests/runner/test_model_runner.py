"""The runner with a tiny model: what goes into a step and what comes out for each sequence."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from engine.core.plan import BlockCopy, BlockTableTail, ScheduledSeq, SchedulerOutput, SeqId, SeqResult
from engine.models.config import MoEConfig
from engine.models.decoder import Decoder
from engine.runner.head import TILE_ROWS
from engine.types import FinishReason, GenerationRequest, Pooling, SamplingParams
from kernels.interface import KernelSet
from tests.choices import request
from tests.models.driver import Driver
from tests.runner.harness import Harness
from tests.runner.tiny import VOCAB_SIZE, tiny_decoder

PROMPT = tuple(np.random.default_rng(0).integers(0, VOCAB_SIZE, 150).tolist())
POISON = 201  # the model never says it


@pytest.fixture
def harness(tiny_model: Decoder, kernels: KernelSet) -> Harness:
    return Harness(tiny_model, kernels, num_blocks=64, budget=64, max_num_seqs=8, max_model_len=512)


def poisoned_model(kernels: KernelSet) -> Decoder:
    """Whoever runs the token POISON gets NaN."""
    decoder = tiny_decoder(kernels)
    decoder._weights.embedding.weight[POISON] = float("nan")
    return decoder


def greedy_reference(decoder: Decoder, kernels: KernelSet, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Step by step through the decoder alone."""
    driver, tokens = Driver(decoder, kernels, num_blocks=200), list(prompt)
    logits = driver.run(0, prompt)[-1]
    for _ in range(num_tokens):
        tokens.append(int(logits.argmax()))
        logits = driver.run(0, tokens[-1:])[-1]
    return tokens[len(prompt) :]


@pytest.mark.parametrize("windows", [(None, None), (24, None), (40, 24)])
def test_greedy_tokens_are_the_decoders(kernels: KernelSet, windows: tuple[int | None, ...]) -> None:
    """Chunked, in several groups, with blocks that leave their windows."""
    decoder = tiny_decoder(kernels, windows)
    harness = Harness(decoder, kernels, num_blocks=64, budget=32, max_model_len=512)
    requests = [request(k, PROMPT[k : 100 + 7 * k], 20) for k in range(3)]
    expected = [greedy_reference(decoder, kernels, one.prompt_token_ids, 20) for one in requests]
    assert harness.tokens(*requests) == expected


def test_tokens_of_each_expert_are_counted_over_all_steps(kernels: KernelSet) -> None:
    """Two sparse layers, two of five experts a token; neither the first run at the start nor buffers' ends count."""
    decoder = tiny_decoder(kernels, (None, None, None), MoEConfig(5, 2, intermediate_size=16, normalize=True))
    harness = Harness(decoder, kernels, budget=64)
    harness.runner.warm_up()
    harness.add(request(0, PROMPT[:90], 3), request(1, PROMPT[50:70], 4))
    expected = np.zeros(5, np.int64)
    num_tokens = 0
    while harness.scheduler.has_work():
        output = harness.scheduler.schedule()
        result = harness.runner.execute(output)
        step_tokens = sum(len(seq.token_ids) for seq in output.seqs)
        counts = decoder.expert_counts(step_tokens)
        assert counts is not None
        expected += counts.sum(axis=0)
        num_tokens += step_tokens
        assert result.expert_tokens_total == tuple(expected.tolist())
        harness.outcomes.hear(harness.scheduler.update(output, result))
    assert expected.sum() == num_tokens * 2 * 2
    assert expected.max() < num_tokens * 2  # not all went the same way


def test_a_dense_model_tells_of_no_experts(harness: Harness) -> None:
    harness.add(request(0, PROMPT[:4], 1))
    assert harness.runner.execute(harness.scheduler.schedule()).expert_tokens_total == ()


def test_two_steps_under_way_give_the_same_tokens(tiny_model: Decoder, kernels: KernelSet) -> None:
    """The second step is laid out while the token it begins with is not known to the scheduler."""
    requests = [request(k, PROMPT[k : 20 + k], 10, temperature=1.0, seed=k) for k in range(3)]
    expected = Harness(tiny_model, kernels).tokens(*requests)
    harness = Harness(tiny_model, kernels)
    harness.add(*requests)
    under_way: deque[SchedulerOutput] = deque()
    results = []
    while harness.scheduler.has_work():
        output = harness.scheduler.schedule()
        if output.seqs:
            under_way.append(output)
            results.append(harness.runner.execute(output))
        if len(under_way) == 2 or not output.seqs:
            harness.outcomes.hear(harness.scheduler.update(under_way.popleft(), results.pop(0)))
    assert [harness.outcomes[SeqId(k, 0)].token_ids for k in range(3)] == expected


def test_prompt_logprobs_cross_chunks_and_tiles(harness: Harness, tiny_model: Decoder, kernels: KernelSet) -> None:
    """150 prompt tokens in chunks of 64, more rows than a tile has; None for the first."""
    assert len(PROMPT) > 2 * TILE_ROWS
    reports = harness.run(request(0, PROMPT, 2, prompt_logprobs=3))[SeqId(0, 0)].prompt_logprobs
    logits = Driver(tiny_model, kernels, num_blocks=200).run(0, PROMPT).astype(np.float64)
    log_softmax = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert reports[0] is None
    assert len(reports) == len(PROMPT)
    for position, report in enumerate(reports[1:], 1):
        assert report is not None
        assert report.token_id == PROMPT[position]
        assert report.logprob == pytest.approx(log_softmax[position - 1, PROMPT[position]], abs=1e-4)
        assert [token for token, _ in report.top] == np.argsort(-log_softmax[position - 1])[:3].tolist()


def test_prompt_logprobs_without_output(harness: Harness) -> None:
    outcome = harness.run(request(0, PROMPT[:5], 0, prompt_logprobs=0))[SeqId(0, 0)]
    assert outcome.token_ids == []
    assert [report.token_id for report in outcome.prompt_logprobs if report] == list(PROMPT[1:5])
    assert outcome.prompt_logprobs[0] is None


def test_prompt_logprobs_of_one_token_are_none(harness: Harness) -> None:
    outcome = harness.run(request(0, PROMPT[:1], 1, prompt_logprobs=1))[SeqId(0, 0)]
    assert outcome.prompt_logprobs == [None]
    assert len(outcome.token_ids) == 1


def test_only_who_asks_gets_logprobs(harness: Harness) -> None:
    asks = [None, 0, 2, None, 1]
    requests = [request(k, PROMPT[k : 10 + k], 4, logprobs=count) for k, count in enumerate(asks)]
    outcomes = harness.run(*requests)
    for k, count in enumerate(asks):
        outcome = outcomes[SeqId(k, 0)]
        assert len(outcome.logprobs) == (0 if count is None else 4)
        for token_id, report in zip(outcome.token_ids, outcome.logprobs, strict=False):
            assert (report.token_id, report.rank) == (token_id, 1)
            assert [token for token, _ in report.top] == [token_id, *[t for t, _ in report.top[1:]]][: count or 0]
            assert len(report.top) == count


def test_a_stop_token_is_masked_before_min_tokens(harness: Harness) -> None:
    """The bias makes it the likeliest at every step."""
    stop: dict[str, Any] = {"stop": (9,), "logit_bias": ((9, 100.0),)}
    outcomes = harness.run(
        request(0, PROMPT[:10], 20, **stop),
        request(1, PROMPT[:10], 20, min_tokens=3, **stop),
    )
    assert outcomes[SeqId(0, 0)].token_ids == [9]
    tokens = outcomes[SeqId(1, 0)].token_ids
    assert len(tokens) == 4
    assert tokens[3] == 9
    assert 9 not in tokens[:3]


def test_penalties_follow_the_outputs(harness: Harness) -> None:
    """A presence penalty beyond any logit: no token comes twice."""
    plain, penalised = harness.tokens(request(0, PROMPT[:9], 60), request(1, PROMPT[:9], 60, presence_penalty=1e4))
    assert len(set(penalised)) == 60
    assert len(set(plain)) < 60


@pytest.mark.parametrize("pooling", list(Pooling))
def test_a_prompt_in_chunks_becomes_one_vector(tiny_model: Decoder, kernels: KernelSet, pooling: Pooling) -> None:
    vectors = []
    for budget in (512, 64, 13):
        harness = Harness(tiny_model, kernels, budget=budget)
        record = GenerationRequest(0, PROMPT, SamplingParams(max_tokens=0), seed=0, pooling=pooling)
        outcome = harness.run(request(1, PROMPT[:30], 3), record)[SeqId(0, 0)]
        assert outcome.finish_reason is FinishReason.LENGTH
        vectors.append(outcome.embedding)
    assert len(vectors[0]) == tiny_model.config.hidden_size
    for vector in vectors[1:]:
        np.testing.assert_allclose(vector, vectors[0], atol=1e-4)


def test_pooling_the_last_token_is_its_hidden_state(harness: Harness, tiny_model: Decoder, kernels: KernelSet) -> None:
    """The head turns it into the logits of the last position."""
    record = GenerationRequest(0, PROMPT, SamplingParams(max_tokens=0), seed=0, pooling=Pooling.LAST)
    vector = np.array([harness.run(record)[SeqId(0, 0)].embedding], np.float32)
    logits = kernels.upload(np.zeros((1, VOCAB_SIZE), np.float32))
    tiny_model.logits(kernels.upload(vector), logits)
    expected = Driver(tiny_model, kernels, num_blocks=200).run(0, PROMPT)[-1]
    np.testing.assert_allclose(kernels.download(logits)[0], expected, atol=1e-4)


def test_a_nan_ends_its_sequence_alone_also_in_blocks_that_are_used_again(kernels: KernelSet) -> None:
    decoder = poisoned_model(kernels)
    clean = [token for token in PROMPT if token != POISON]
    fine = request(0, clean[:20], 12)
    expected = greedy_reference(decoder, kernels, fine.prompt_token_ids, 12)
    harness = Harness(decoder, kernels, num_blocks=12, budget=64, max_num_seqs=3, max_model_len=64, prefix_cache=False)
    outcomes = harness.run(fine, *[request(k, [*clean[k : 15 + k], POISON], 5) for k in range(1, 9)])
    assert outcomes[SeqId(0, 0)].token_ids == expected
    for k in range(1, 9):
        assert outcomes[SeqId(k, 0)].finish_reason is FinishReason.ERROR
        assert "NaN" in str(outcomes[SeqId(k, 0)].error)
    assert harness.tokens(request(20, fine.prompt_token_ids, 12)) == [expected]


@pytest.mark.parametrize("pooling", list(Pooling))
def test_a_vector_of_nan_is_an_error(kernels: KernelSet, pooling: Pooling) -> None:
    harness = Harness(poisoned_model(kernels), kernels)
    record = GenerationRequest(0, (1, POISON, 3), SamplingParams(max_tokens=0), seed=0, pooling=pooling)
    outcome = harness.run(record)[SeqId(0, 0)]
    assert outcome.finish_reason is FinishReason.ERROR
    assert outcome.embedding == ()


def test_prompt_logprobs_of_nan_are_an_error(kernels: KernelSet) -> None:
    harness = Harness(poisoned_model(kernels), kernels)
    outcome = harness.run(request(0, (1, POISON, 3), 0, prompt_logprobs=1))[SeqId(0, 0)]
    assert outcome.finish_reason is FinishReason.ERROR


def test_a_sequence_whose_every_token_is_masked_ends_with_an_error(harness: Harness) -> None:
    stuck = request(0, PROMPT[:5], 5, allowed_token_ids=(3,), bad_words=((3,),))
    outcomes = harness.run(stuck, request(1, PROMPT[:5], 5))
    assert "masked" in str(outcomes[SeqId(0, 0)].error)
    assert len(outcomes[SeqId(1, 0)].token_ids) == 5


def test_more_sequences_than_slots_one_after_the_other(harness: Harness) -> None:
    requests = [request(k, PROMPT[k : 5 + k], 3, temperature=float(k % 2), seed=k) for k in range(20)]
    expected = [
        harness.tokens(
            request(100 + one.request_id, one.prompt_token_ids, 3, seed=one.seed, temperature=one.sampling.temperature)
        )[0]
        for one in requests
    ]
    assert harness.tokens(*requests) == expected


def scheduled(seq: int, tokens: tuple[int, ...], start: int, blocks: tuple[int, ...], record: bool) -> ScheduledSeq:
    fresh = GenerationRequest(seq, (*PROMPT[:16],), SamplingParams(max_tokens=9, temperature=0.0), seed=0)
    tails = tuple(BlockTableTail(0 if blocks else 1, blocks) for _ in range(1))
    return ScheduledSeq(SeqId(seq, 0), start, tokens, tails, 1, True, 0, fresh if record else None)


def test_blocks_are_copied_before_the_step_writes(harness: Harness) -> None:
    """Two sequences share 15 tokens in block 1; the second writes its sixteenth into a copy, the first in place."""
    runner = harness.runner
    first = runner.execute(SchedulerOutput(0, (scheduled(0, PROMPT[:15], 0, (1,), True),)))
    both = SchedulerOutput(
        1,
        (scheduled(0, (PROMPT[15],), 15, (), False), scheduled(1, (PROMPT[15],), 15, (2,), True)),
        block_copies=(BlockCopy(0, 1, 2),),
    )
    results = runner.execute(both).results
    assert results[0].token_ids == results[1].token_ids
    runner.execute(SchedulerOutput(2, (scheduled(1, (PROMPT[16],), 15, (), False),)))
    again = runner.execute(SchedulerOutput(3, (scheduled(0, (PROMPT[15],), 15, (), False),)))
    assert again.results[0].token_ids == results[0].token_ids
    assert first.results[0].error is None


def test_a_record_that_comes_again_starts_anew(harness: Harness) -> None:
    """Resumed before it was forgotten: the same slot is free for it, none is lost."""
    for step in range(30):
        [result] = harness.runner.execute(SchedulerOutput(step, (scheduled(0, PROMPT[:16], 0, (1,), True),))).results
        assert isinstance(result, SeqResult)
        assert result.error is None
    harness.runner.forget([SeqId(0, 0), SeqId(5, 5)])


def test_a_step_without_sequences_only_forgets(harness: Harness) -> None:
    assert harness.runner.execute(SchedulerOutput(0, (), forget=(SeqId(1, 1),))).results == ()
