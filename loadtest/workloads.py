"""Workloads as data: what is asked (lengths, sharing, turns, manners) and how it arrives.

The built-in ones are in workloads.toml beside this file; a user's own file has the same shape and is checked
in the same way, with errors that name the place in the file.
"""

from __future__ import annotations

import math
import tomllib
from enum import StrEnum
from importlib import resources
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from loadtest.errors import BenchError

Positive = Annotated[int, Meta(ge=1)]


class Uniform(Struct, frozen=True, tag="uniform", tag_field="kind", forbid_unknown_fields=True):
    """Whole numbers low … high, both included, all equally likely."""

    low: Positive
    high: Positive


class LogNormal(Struct, frozen=True, tag="lognormal", tag_field="kind", forbid_unknown_fields=True):
    """exp(normal(ln median, sigma)), redrawn until it lies in low … high: the heavy tail of real traffic."""

    median: Annotated[float, Meta(gt=0)]
    sigma: Annotated[float, Meta(gt=0)]
    low: Positive
    high: Positive


Lengths = Positive | Uniform | LogNormal


class Manners(StrEnum):
    """How the client behaves while one request runs."""

    NORMAL = "normal"
    LEAVES = "leaves"  # closes the connection after a few chunks
    DAWDLES = "dawdles"  # pauses before each read
    MALFORMED = "malformed"  # sends a body that is no JSON; a 4xx is the right answer
    IMPOSSIBLE = "impossible"  # asks for what no server may grant (temperature −1); a 4xx is the right answer


class RequestClass(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of request in a workload. Lengths are in tokens."""

    name: str
    prompt: Lengths  # tokens of its own, per turn
    output: Lengths
    shared: Annotated[int, Meta(ge=0)] = 0  # tokens in front that all requests of a group have in common
    groups: Positive = 1  # distinct shared prefixes
    turns: Lengths = 1  # > 1: a chat whose history grows by the server's real answers
    think_seconds: Annotated[float, Meta(ge=0)] = 0.0  # from the end of an answer to the next turn
    weight: Annotated[float, Meta(gt=0)] = 1.0  # share of the sessions drawn
    count: Annotated[int, Meta(ge=0)] = 0  # > 0: exactly this many sessions, first; else drawn by weight
    manners: Manners = Manners.NORMAL
    body: dict[str, Any] = {}  # merged over the request's body: { priority = 5 }, for instance
    api_key: str = ""  # a client of its own; else the run's key


class Closed(Struct, frozen=True, tag="closed", tag_field="kind", forbid_unknown_fields=True):
    """N users: each sends its next session when its last one has ended."""

    users: Positive


class Open(Struct, frozen=True, tag="open", tag_field="kind", forbid_unknown_fields=True):
    """Sessions arrive whatever the server does. Gaps are gamma with shape `burstiness`; 1 = Poisson."""

    rate: Annotated[float, Meta(gt=0)]  # sessions per second
    burstiness: Annotated[float, Meta(gt=0)] = 1.0  # < 1: bursts; coefficient of variation = 1/√burstiness


class Replay(Struct, frozen=True, tag="replay", tag_field="kind", forbid_unknown_fields=True):
    """Sessions arrive at recorded times."""

    path: str
    speed: Annotated[float, Meta(gt=0)] = 1.0  # 2 = twice as fast as recorded


class Intrusion(Struct, frozen=True, tag="intrusion", tag_field="kind", forbid_unknown_fields=True):
    """Streams of one class run; when each has `after_tokens`, the other classes intrude, closed loop."""

    background: str  # the class that runs first
    after_tokens: Positive
    users: Positive  # intruders at once


Load = Closed | Open | Replay | Intrusion


class Workload(Struct, frozen=True, forbid_unknown_fields=True):
    """A named set of request classes with the load and the number of sessions it is meant for."""

    description: str
    sessions: Positive
    load: Load
    classes: tuple[RequestClass, ...]
    endpoint: str = "completions"  # or "chat"
    name: str = ""


def sample(lengths: Lengths, rng: Random) -> int:
    """One length in tokens, from `rng` alone."""
    match lengths:
        case int():
            return lengths
        case Uniform(low=low, high=high):
            return rng.randint(low, high)
        case LogNormal():
            while True:
                value = round(rng.lognormvariate(math.log(lengths.median), lengths.sigma))
                if lengths.low <= value <= lengths.high:
                    return value


def builtin_workloads() -> dict[str, Workload]:
    """The workloads that come with the package, by name."""
    return _parse(resources.files("loadtest").joinpath("workloads.toml").read_text("utf-8"), "workloads.toml")


def load_workloads(path: Path) -> dict[str, Workload]:
    """The workloads of a user's TOML file, by name. Raises BenchError naming file and place."""
    try:
        return _parse(path.read_text("utf-8"), str(path))
    except OSError as error:
        raise BenchError(f"cannot read the workload file {path}: {error.strerror}") from error


def _parse(text: str, source: str) -> dict[str, Workload]:
    try:
        tables = tomllib.loads(text)
        workloads = {name: msgspec.convert({**table, "name": name}, Workload) for name, table in tables.items()}
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BenchError(f"{source}: {error}") from error
    for workload in workloads.values():
        _check(workload, source)
    return workloads


def _check(workload: Workload, source: str) -> None:
    names = [request_class.name for request_class in workload.classes]
    if not names or len(set(names)) != len(names):
        raise BenchError(f"{source}: {workload.name}: the classes need distinct names, and at least one")
    if workload.endpoint not in ("completions", "chat"):
        raise BenchError(f"{source}: {workload.name}: endpoint is {workload.endpoint!r}, not completions or chat")
    if isinstance(workload.load, Intrusion) and workload.load.background not in names:
        raise BenchError(f"{source}: {workload.name}: no class {workload.load.background!r} to run in the background")
