"""Sequences laid side by side for the kernels."""

from __future__ import annotations

import numpy as np

from engine.runner.sampler import LOWEST_LOGPROB, SamplingTable, token_logprobs
from engine.runner.sequence_state import SequenceState
from engine.types import GenerationRequest, SamplingParams
from kernels.interface import Csr, KernelSet


def state_of(slot: int, stop: tuple[int, ...] = (), outputs: tuple[int, ...] = (), **sampling: object) -> SequenceState:
    params = SamplingParams(max_tokens=100, **sampling)  # type: ignore[arg-type]
    record = GenerationRequest(
        slot, (1, 2), params, seed=2**64 - 1 - slot, stop_token_ids=stop, output_token_ids=outputs
    )
    return SequenceState(record, slot)


def rows(csr: Csr | None) -> list[list[int]]:
    assert csr is not None
    return [part.tolist() for part in np.split(csr.token_ids, csr.row_starts[1:-1])]


def test_rows_follow_the_sequences_not_the_slots() -> None:
    table = SamplingTable(4)
    states = [state_of(3, temperature=0.5, top_k=7), state_of(0, top_p=0.25, min_p=0.125)]
    for state in states:
        table.set(state.slot, state.record)
    batch = table.batch(states, [11, 12])
    assert batch.temperature.tolist() == [0.5, 1.0]
    assert batch.top_k.tolist() == [7, 0]
    assert batch.top_p.tolist() == [1.0, 0.25]
    assert batch.min_p.tolist() == [0.0, 0.125]
    assert batch.seed.tolist() == [2**64 - 4, 2**64 - 1]
    assert batch.output_position.tolist() == [11, 12]
    assert (batch.allowed, batch.banned, batch.bias, batch.penalties) == (None, None, None, None)


def test_a_slot_forgets_its_last_sequence() -> None:
    table = SamplingTable(1)
    table.set(0, state_of(0, temperature=0.5, top_k=7, top_p=0.5, min_p=0.5).record)
    plain = state_of(0)
    table.set(0, plain.record)
    batch = table.batch([plain], [0])
    assert (batch.temperature[0], batch.top_k[0], batch.top_p[0], batch.min_p[0]) == (1.0, 0, 1.0, 0.0)


def test_sparse_parts_keep_to_their_rows() -> None:
    states = [
        state_of(0),
        state_of(1, stop=(5,), min_tokens=1, logit_bias=((3, 1.5),)),
        state_of(2, allowed_token_ids=(8, 4)),
        state_of(3, repetition_penalty=1.5, frequency_penalty=0.25, outputs=(2, 9, 9)),
    ]
    batch = SamplingTable(4).batch(states, [0, 0, 0, 3])
    assert rows(batch.banned) == [[], [5], [], []]
    assert rows(batch.allowed) == [[], [], [4, 8], []]
    assert batch.bias is not None
    assert batch.bias.row_starts.tolist() == [0, 0, 1, 1, 1]
    assert batch.bias.values.tolist() == [1.5]
    assert batch.penalties is not None
    assert batch.penalties.row_starts.tolist() == [0, 0, 0, 0, 3]
    assert batch.penalties.token_ids.tolist() == [1, 2, 9]
    assert batch.penalties.output_counts.tolist() == [0, 1, 2]
    assert batch.penalties.repetition.tolist() == [1, 1, 1, 1.5]
    assert batch.penalties.frequency.tolist() == [0, 0, 0, 0.25]


def test_reports_cut_alternatives_and_floor_minus_infinity(kernels: KernelSet) -> None:
    logits = np.array([[2.0, -np.inf, 1.0, 0.0], [np.nan, 0, 0, 0], [0, 0, 0, 0]], np.float32)
    reports = token_logprobs(kernels, kernels.upload(logits), [1, 0, 2], [2, 0, 1])
    assert reports[0] is not None
    assert reports[0].logprob == LOWEST_LOGPROB
    assert reports[0].rank == 4
    assert [token for token, _ in reports[0].top] == [0, 2]
    assert reports[1] is None
    assert reports[2] is not None
    assert reports[2].rank == 3
    assert [token for token, _ in reports[2].top] == [0]
