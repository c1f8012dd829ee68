"""A well-behaved client beside the hostile ones: it must get every token, in time.

In a process of its own, so that it does not wait for the attackers' interpreter. As a program it asks for one stream
again and again until its standard input ends, then prints what it saw: python -m tests.conformance.bystander PORT
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

from tests.e2e.live import ROOT

TOKENS = 400
BODY: dict[str, Any] = {
    "prompt": "The bystander",
    "max_tokens": TOKENS,
    "seed": 11,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


@dataclass
class Seen:
    """What it saw."""

    answers: list[list[int]] = field(default_factory=list)  # the tokens of each whole answer
    longest_gap: float = 0.0  # seconds between one event and the next within a stream
    faults: list[str] = field(default_factory=list)


class Bystander:
    """The program, between `with` and its end; then `seen` is filled, with at least one whole answer or a fault."""

    def __init__(self, port: int) -> None:
        self._command = [sys.executable, "-m", "tests.conformance.bystander", str(port)]
        self.seen = Seen()

    def __enter__(self) -> Bystander:
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # its first stream has begun
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        output, _ = self._process.communicate(timeout=60)
        self.seen = Seen(**json.loads(output))


def stream(port: int, seen: Seen) -> None:
    """One answer, from its request to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    token_ids: list[int] = []
    times: list[float] = []
    try:
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"{response.status}: {response.read()!r}")
        for line in response:
            if line.startswith(b"data: {"):
                if not times and not seen.answers:
                    print("reading", flush=True)  # noqa: T201
                times.append(time.monotonic())
                token_ids += json.loads(line[6:])["choices"][0].get("token_ids", [])
    finally:
        connection.close()
    seen.answers.append(token_ids)
    seen.longest_gap = max([seen.longest_gap, *(later - sooner for sooner, later in pairwise(times))])


def main() -> None:
    seen = Seen()
    try:
        stream(int(sys.argv[1]), seen)
        while not select.select([sys.stdin], [], [], 0)[0]:
            stream(int(sys.argv[1]), seen)
    except Exception as error:  # whatever it is: the bystander has noticed
        seen.faults.append(repr(error))
    json.dump(asdict(seen), sys.stdout)


if __name__ == "__main__":
    main()
