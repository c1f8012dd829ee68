"""A well-behaved client beside the hostile ones: it must get every token, in time."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.e2e.live import LiveServer

BODY: dict[str, Any] = {
    "prompt": "The bystander",
    "max_tokens": 400,
    "seed": 11,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


@dataclass
class Bystander:
    """Asks for the same stream again and again, in a thread of its own, between `with` and its end."""

    server: LiveServer
    answers: list[list[int]] = field(default_factory=list)  # the tokens of each whole answer
    gaps: list[float] = field(default_factory=list)  # seconds between one event and the next within a stream
    faults: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.answers.append(self._stream())
        except Exception as error:  # whatever it is: the bystander has noticed
            self.faults.append(repr(error))

    def _stream(self) -> list[int]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        token_ids: list[int] = []
        times: list[float] = []
        try:
            connection.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise AssertionError(response.read())
            for line in response:
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
                    token_ids += json.loads(line[6:])["choices"][0].get("token_ids", [])
        finally:
            connection.close()
        self.gaps += [later - sooner for sooner, later in pairwise(times)]
        return token_ids
