"""Grids of parameters thinned until every two values still meet in some case."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Hashable, Sequence

Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]


def pairwise(**factors: Sequence[Hashable]) -> list[dict[str, Hashable]]:
    """Cases that hold every pair of values of two different factors at least once; always the same ones.

    Greedy: each case begins with a pair that is still missing and takes, factor by factor, the value that brings most
    of the missing pairs.
    """
    names = list(factors)
    pairs = [
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(factors[a], factors[b])
    ]
    missing = dict.fromkeys(pairs)  # in a fixed order, unlike a set
    cases: list[dict[str, Hashable]] = []
    while missing:
        case = dict(next(iter(missing)))
        for name in names:
            if name not in case:
                case[name] = max(factors[name], key=functools.partial(_gain, missing, case, names, name))
        ordered = [(name, case[name]) for name in names]
        for pair in itertools.combinations(ordered, 2):
            missing.pop(pair, None)
        cases.append(dict(ordered))
    return cases


def _gain(
    missing: Collection[Pair], case: dict[str, Hashable], names: Sequence[str], name: str, value: Hashable
) -> int:
    """How many missing pairs `value` would make with what the case has already."""
    trial = case | {name: value}
    chosen = [(other, trial[other]) for other in names if other in trial]
    return sum(pair in missing for pair in itertools.combinations(chosen, 2) if (name, value) in pair)
