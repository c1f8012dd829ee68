"""String stops: where a text ends, and what of it may be sent meanwhile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple


class StopMatch(NamedTuple):
    """A stop string found at characters start … end − 1 of the text."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """Watches one text for stop strings.

    The stop that starts first wins; of those that start together the shortest. The result is that of a search in
    the whole text, however the text was cut into pieces: while a stop is complete but one that starts before it
    could still become so, the decision waits. Text is held back only while it can still become part of a stop.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError if a stop is empty. Without stops all text passes."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops: Final = tuple(sorted(stops, key=len))
        self._longest: Final = len(self._stops[-1]) if stops else 0
        # Leftmost match, and at one place the first alternative: the shortest.
        self._whole: Final = re.compile("|".join(map(re.escape, self._stops)))
        self._firsts: Final = re.compile("|".join(sorted({re.escape(stop[0]) for stop in stops})))
        self._held = ""
        self._num_passed = 0
        self.match: StopMatch | None = None

    def feed(self, text: str) -> str:
        """Take the next piece of the text; returns what may be sent, which ends where a found stop starts. Once
        `match` is set nothing passes any more."""
        if not self._stops:
            return text
        if self.match is not None:
            return ""
        if not self._held and self._firsts.search(text) is None:
            self._num_passed += len(text)
            return text
        self._held += text
        found = self._whole.search(self._held)
        unsure = self._unsure_from()
        if found is not None and found.start() <= unsure:
            start = self._num_passed + found.start()
            self.match = StopMatch(found[0], start, start + len(found[0]))
            unsure = found.start()
        passed, self._held = self._held[:unsure], self._held[unsure:]
        self._num_passed += unsure
        return passed

    def flush(self) -> str:
        """The text has ended: what is held can become no stop any more, unless it holds one that waited for an
        earlier start; then `match` is set and the text before it returned."""
        passed, self._held = self._held, ""
        if self.match is not None or not self._stops:
            return ""
        found = self._whole.search(passed)
        if found is not None:
            start = self._num_passed + found.start()
            self.match = StopMatch(found[0], start, start + len(found[0]))
            passed = passed[: found.start()]
        self._num_passed += len(passed)
        return passed

    def _unsure_from(self) -> int:
        """Where the earliest proper beginning of a stop starts that runs to the end of the held text; the text's
        length if there is none."""
        held = self._held
        for candidate in self._firsts.finditer(held, max(0, len(held) - self._longest + 1)):
            tail = held[candidate.start() :]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return candidate.start()
        return len(held)
