"""The scripted executor follows its published rules."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig, FakeOptions, Fault
from engine.core.plan import PENDING_TOKEN, BlockTableTail, ScheduledSeq, SchedulerOutput, SeqId, SeqResult
from engine.fake_executor import FakeExecutor, build_fake_executor
from engine.types import GenerationRequest, LoadProgress, Pooling, SamplingParams

GREEDY = SamplingParams(100, temperature=0.0)
REQUEST = GenerationRequest(request_id=1, prompt_token_ids=(5, 6, 7), sampling=GREEDY, seed=1)
TABLES = (BlockTableTail(0, (1,)),)


def made(life: int = 1, **options: Any) -> FakeExecutor:
    config = EngineConfig("", executor="fake", fake=FakeOptions(**options))
    return build_fake_executor(config, lambda progress: None, life)[0]


def run(executor: FakeExecutor, *seqs: ScheduledSeq, step_id: int = 1) -> list[SeqResult]:
    return list(executor.collect(executor.submit(SchedulerOutput(step_id, seqs))).results)


def first_step(record: GenerationRequest = REQUEST) -> ScheduledSeq:
    """The whole prompt and outputs so far in one go."""
    tokens = record.prompt_token_ids + record.output_token_ids
    seq_id = SeqId(record.request_id, record.choice_index)
    return ScheduledSeq(seq_id, 0, tokens, TABLES, 1, True, len(record.output_token_ids), record)


def generate(executor: FakeExecutor, count: int, record: GenerationRequest = REQUEST) -> list[int]:
    tokens = [*run(executor, first_step(record))[0].token_ids]
    start = len(record.prompt_token_ids) + len(record.output_token_ids)
    while len(tokens) < count:
        position = start + len(tokens) - 1
        seq = first_step(record)._replace(
            start_position=position,
            token_ids=(tokens[-1],),
            output_position=len(record.output_token_ids) + len(tokens),
            record=None,
        )
        tokens += run(executor, seq)[0].token_ids
    return tokens


def test_echo_and_script_repeat_their_tokens() -> None:
    assert generate(made(rule="echo"), 7) == [5, 6, 7, 5, 6, 7, 5]
    assert generate(made(rule="script", script=(9, 8)), 3) == [9, 8, 9]


def test_a_resumed_sequence_goes_on_with_the_same_tokens() -> None:
    whole = generate(made(), 20)
    resumed = replace(REQUEST, output_token_ids=tuple(whole[:7]))
    assert generate(made(), 13, resumed) == whole[7:]


def test_a_lost_token_changes_what_follows() -> None:
    whole = generate(made(), 20)
    assert generate(made(), 12, replace(REQUEST, output_token_ids=tuple(whole[:6] + whole[7:8]))) != whole[8:]


def test_seed_and_choice_count_unless_greedy() -> None:
    drawn = replace(REQUEST, sampling=SamplingParams(100))
    variants = [drawn, replace(drawn, seed=2), replace(drawn, choice_index=1)]
    assert len({tuple(generate(made(), 5, record)) for record in variants}) == 3
    greedy = [replace(record, sampling=GREEDY) for record in variants]
    assert len({tuple(generate(made(), 5, record)) for record in greedy}) == 1


def test_a_pending_token_is_the_one_sampled_before() -> None:
    executor = made()
    whole = generate(made(), 2)
    pending = first_step()._replace(start_position=3, token_ids=(PENDING_TOKEN,), output_position=1, record=None)
    tickets = [
        executor.submit(SchedulerOutput(1, (first_step(),))),
        executor.submit(SchedulerOutput(2, (pending,))),
    ]
    assert [executor.collect(ticket).results[0].token_ids[0] for ticket in tickets] == whole


def test_a_chunk_that_does_not_sample_gives_no_token() -> None:
    seq = first_step()._replace(token_ids=(5, 6), num_logits_rows=0, sample=False)
    assert run(made(), seq) == [SeqResult(SeqId(1, 0))]


def test_logprobs_are_well_formed() -> None:
    sampling = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    [result] = run(made(), first_step(replace(REQUEST, sampling=sampling))._replace(num_logits_rows=3))
    [logprobs] = result.logprobs
    assert (logprobs.token_id, logprobs.rank, logprobs.top[0]) == (result.token_ids[0], 1, (logprobs.token_id, -0.5))
    assert [entry and entry.token_id for entry in result.prompt_logprobs] == [None, 6, 7]


def test_prompt_logprobs_of_chunks_add_up() -> None:
    record = replace(REQUEST, sampling=replace(GREEDY, prompt_logprobs=0))
    executor = made()
    first = first_step(record)._replace(token_ids=(5, 6), num_logits_rows=2, sample=False)
    second = first._replace(start_position=2, token_ids=(7,), num_logits_rows=1, record=None)
    told = [run(executor, seq)[0].prompt_logprobs for seq in (first, second)]
    assert [[entry and entry.token_id for entry in part] for part in told] == [[None, 6, 7], []]


@pytest.mark.parametrize(("num_logits_rows", "told"), [(0, []), (1, [7]), (2, [None, 6, 7])])
def test_prompt_logprobs_are_told_of_the_wanted_rows_alone(num_logits_rows: int, told: list[int | None]) -> None:
    record = replace(REQUEST, sampling=replace(GREEDY, prompt_logprobs=0))
    seq = first_step(record)._replace(token_ids=(5, 6), num_logits_rows=num_logits_rows, sample=False)
    [result] = run(made(), seq)
    assert [entry and entry.token_id for entry in result.prompt_logprobs] == told


def test_an_embedding_has_the_hidden_size_and_length_one() -> None:
    [result] = run(made(hidden_size=3), first_step(replace(REQUEST, pooling=Pooling.MEAN))._replace(sample=False))
    assert result.embedding == (1.0, 0.0, 0.0)


def test_a_step_costs_what_the_options_say() -> None:
    executor = made(step_seconds=0.02, token_seconds=0.01)
    begun = time.monotonic()
    run(executor, first_step())
    assert time.monotonic() - begun >= 0.05


def test_a_fault_strikes_at_its_step_and_in_its_lives() -> None:
    fault = Fault("raise", step=2, lives=1)
    executor = made(faults=(fault,))
    generate(executor, 1)
    with pytest.raises(RuntimeError):
        generate(executor, 1)
    assert len(generate(made(life=2, faults=(fault,)), 5)) == 5


def test_a_poisoned_sequence_fails_alone() -> None:
    executor = made(faults=(Fault("error", token_id=6),))
    healthy = replace(REQUEST, request_id=2, prompt_token_ids=(1,))
    bad, good = run(executor, first_step(), first_step(healthy))
    assert (bad.error, bad.token_ids) == ("scripted failure of this sequence", ())
    assert (good.error, len(good.token_ids)) == (None, 1)


def test_loading_reports_and_the_info_follows_the_configuration() -> None:
    reports: list[LoadProgress] = []
    config = EngineConfig("", max_num_seqs=4, executor="fake", fake=FakeOptions(kv_cache_tokens=100))
    executor, info = build_fake_executor(config, reports.append, 1)
    assert [report.fraction for report in reports] == [0.0, 0.25, 0.5, 0.75]
    assert (info.num_kv_blocks, info.max_model_len, info.max_num_seqs) == ((6,), 96, 4)
    assert executor.capacity().groups[0].num_blocks == 7


def test_sixty_four_sequences_take_well_under_a_millisecond() -> None:
    executor = made()
    records = [replace(REQUEST, request_id=i) for i in range(64)]
    run(executor, *[first_step(record) for record in records])
    seqs = tuple([first_step(r)._replace(start_position=3, token_ids=(1,), record=None) for r in records])
    best = min(_timed(executor, SchedulerOutput(step, seqs)) for step in range(2, 50))
    assert best < 1e-3


def _timed(executor: FakeExecutor, output: SchedulerOutput) -> float:
    begun = time.perf_counter()
    executor.collect(executor.submit(output))
    return time.perf_counter() - begun
