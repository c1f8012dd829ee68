"""Arrival times of an open-loop load."""

from __future__ import annotations

from random import Random


def gamma_arrivals(num: int, rate: float, burstiness: float, rng: Random) -> list[float]:
    """`num` times in seconds, the first at 0: independent gamma gaps of mean 1/rate and shape `burstiness`.

    1 is a Poisson process, smaller values come in bursts, large ones approach a metronome.
    """
    times, now = [], 0.0
    for _ in range(num):
        times.append(now)
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times
