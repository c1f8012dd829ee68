"""What a sequence's record and outputs come to for the next draw."""

from __future__ import annotations

from typing import Any

import pytest

from engine.runner.sequence_state import SequenceState
from engine.types import GenerationRequest, SamplingParams


def state_of(
    prompt: tuple[int, ...] = (1, 2, 3),
    outputs: tuple[int, ...] = (),
    stop: tuple[int, ...] = (),
    **sampling: object,
) -> SequenceState:
    params = SamplingParams(max_tokens=100, **sampling)  # type: ignore[arg-type]
    return SequenceState(GenerationRequest(1, prompt, params, 0, stop, outputs), slot=0)


def banned(state: SequenceState) -> list[int]:
    tokens: list[int] = state.banned_tokens().tolist()
    return tokens


def counts(state: SequenceState) -> dict[int, int]:
    assert state.edits is not None
    assert state.edits.counts is not None
    return dict(zip(state.edits.counts.token_ids.tolist(), state.edits.counts.output_counts.tolist(), strict=True))


@pytest.mark.parametrize("plain", [{}, {"min_tokens": 5}, {"logprobs": 3}])
def test_plain_sampling_edits_nothing(plain: dict[str, Any]) -> None:
    """min_tokens without stop tokens forbids nothing."""
    assert state_of(**plain).edits is None


def test_stop_tokens_are_banned_until_min_tokens_exist() -> None:
    state = state_of(stop=(9, 7), min_tokens=2)
    assert banned(state) == [7, 9]
    state.add_output(5)
    assert banned(state) == [7, 9]
    state.add_output(5)
    assert banned(state) == []


def test_outputs_of_the_record_count_towards_min_tokens() -> None:
    assert banned(state_of(outputs=(5, 5), stop=(7,), min_tokens=2)) == []


def test_a_bad_word_of_one_token_is_always_banned() -> None:
    state = state_of(bad_words=((8,), (4,)), stop=(6,), min_tokens=1)
    assert banned(state) == [4, 6, 8]
    state.add_output(1)
    assert banned(state) == [4, 8]


def test_a_longer_bad_word_is_banned_where_it_would_be_completed() -> None:
    state = state_of(prompt=(1, 2), bad_words=((2, 3, 4), (3, 5)))
    assert banned(state) == []
    state.add_output(3)  # begun in the prompt: 2 3
    assert banned(state) == [4, 5]
    state.add_output(3)
    assert banned(state) == [5]
    state.add_output(9)
    assert banned(state) == []


def test_a_bad_word_longer_than_all_tokens_is_not_there_yet() -> None:
    assert banned(state_of(prompt=(2,), bad_words=((1, 2, 3),))) == []


def test_repetition_sees_prompt_and_outputs_and_the_others_only_outputs() -> None:
    repetition = state_of(prompt=(4, 4, 6), outputs=(6, 8), repetition_penalty=1.2)
    assert counts(repetition) == {4: 0, 6: 1, 8: 1}
    presence = state_of(prompt=(4, 4, 6), outputs=(6, 8), presence_penalty=0.5)
    assert counts(presence) == {6: 1, 8: 1}


def test_counts_grow_with_the_outputs() -> None:
    """Past the first capacity, too."""
    state = state_of(frequency_penalty=0.1)
    expected: dict[int, int] = {}
    for token in [*range(100, 140), *range(100, 130), 100]:
        state.add_output(token)
        expected[token] = expected.get(token, 0) + 1
    assert counts(state) == expected


def test_bias_and_allowed_tokens_are_merged() -> None:
    edits = state_of(logit_bias=((5, 1.0), (3, 2.0), (5, -1.0)), allowed_token_ids=(9, 2, 9)).edits
    assert edits is not None
    assert dict(zip(edits.bias[0].tolist(), edits.bias[1].tolist(), strict=True)) == {5: -1.0, 3: 2.0}
    assert edits.allowed.tolist() == [2, 9]
