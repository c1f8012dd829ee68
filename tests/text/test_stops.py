"""String stops: the result of a search in the whole text, however it arrives; nothing of a stop is ever sent."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.stops import StopMatch, StopMatcher

_LETTERS = st.text(alphabet="ab\n", max_size=24)
_STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def _whole_search(text: str, stops: list[str]) -> StopMatch | None:
    """The stop that starts first, of those the shortest."""
    found = [StopMatch(stop, text.find(stop), text.find(stop) + len(stop)) for stop in stops if stop in text]
    return min(found, key=lambda match: (match.start, match.end), default=None)


@settings(max_examples=1500, deadline=None)
@given(text=_LETTERS, stops=_STOPS, cuts=st.lists(st.integers(0, 24), max_size=8))
def test_equals_a_search_in_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, sent = StopMatcher(stops), ""
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for start, end in pairwise(places):
        sent += matcher.feed(text[start:end])
        expected = _whole_search(text, stops)
        assert len(sent) <= (expected.start if expected else len(text))
    sent += matcher.flush()
    expected = _whole_search(text, stops)
    assert matcher.match == expected
    assert sent == (text[: expected.start] if expected else text)


@settings(max_examples=500, deadline=None)
@given(text=_LETTERS, stops=_STOPS)
def test_holds_back_only_what_can_still_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = matcher.feed(text)
    if matcher.match is None:
        held = text[len(sent) :]
        assert held == "" or any(stop.startswith(held[: len(stop)]) for stop in stops)


def test_a_stop_that_starts_within_a_piece_and_ends_in_a_later_one() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.feed(piece) for piece in ("Yes.\n", "\nUs", "er", ": more")] == ["Yes.", "", "", ""]
    assert matcher.match == StopMatch("\n\nUser:", 4, 11)


def test_text_that_turns_out_to_be_no_stop_is_sent() -> None:
    matcher = StopMatcher(["</s>"])
    assert [matcher.feed(piece) for piece in ("a <", "/", "b> <", "/s")] == ["a ", "", "</b> ", ""]
    assert matcher.flush() == "</s"
    assert matcher.match is None


def test_an_earlier_start_wins_over_an_earlier_end() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.feed("xabc") == "x"
    assert matcher.match is None
    assert matcher.feed("d") == ""
    assert matcher.match == StopMatch("abcd", 1, 5)


def test_a_complete_stop_wins_when_the_earlier_one_fails() -> None:
    for ending in ("e", None):
        matcher = StopMatcher(["bc", "abcd"])
        sent = matcher.feed("xabc")
        sent += matcher.feed(ending) if ending else matcher.flush()
        assert sent == "xa"
        assert matcher.match == StopMatch("bc", 2, 4)


def test_of_stops_that_start_together_the_shortest_wins() -> None:
    matcher = StopMatcher(["stopping", "stop"])
    assert matcher.feed("stopping") == ""
    assert matcher.match == StopMatch("stop", 0, 4)


def test_nothing_passes_after_the_end() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.feed("ax") == "a"
    assert matcher.feed("bcd") == matcher.flush() == ""


def test_without_stops_all_text_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("a\n") == "a\n"
    assert matcher.flush() == ""
    assert matcher.match is None


@pytest.mark.parametrize("stop", ["^", "]", "-", "\\", ".*", "[a-z]", "a|b", "😀", "$"])
def test_stops_are_no_patterns(stop: str) -> None:
    matcher = StopMatcher([stop])
    assert matcher.feed("xyz") == "xyz"
    assert matcher.feed(stop) == ""
    assert matcher.match == StopMatch(stop, 3, 3 + len(stop))


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])
