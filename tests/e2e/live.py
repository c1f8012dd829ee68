"""A real server as a child process, and what tests ask of it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0  # on a busy machine; a warm start takes a few


@dataclass
class LiveServer:
    """`octavo serve`, from outside."""

    process: subprocess.Popen[str]
    url: str = ""  # http://127.0.0.1:PORT
    lines: list[str] = field(default_factory=list)  # what it has said on stderr
    trust: str | None = None  # a certificate to trust beside the system's

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def http(self, timeout: float = 60.0) -> httpx.Client:
        verify = True if self.trust is None else ssl.create_default_context(cafile=self.trust)
        return httpx.Client(base_url=self.url, timeout=timeout, verify=verify)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over their labels."""
        with self.http() as http:
            text = http.get("/metrics").text
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 30.0) -> int:
        """Its exit code."""
        return self.process.wait(seconds)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "server.cli", *flags]


@contextlib.contextmanager
def serving(*flags: str, ready: bool = True, trust: str | None = None, **environment: str) -> Iterator[LiveServer]:
    """A server on a free port; stopped at the end, by force if need be. `ready` False: only wait for the process."""
    server = LiveServer(
        subprocess.Popen(
            command("serve", "--port", "0", *flags),
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ),
        trust=trust,
    )
    arrived: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(server, arrived), daemon=True)
    reader.start()
    try:
        if ready:
            _wait_ready(server, arrived)
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
            try:
                server.process.wait(15)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
        reader.join(5)
        if server.process.stderr is not None:
            server.process.stderr.close()


def _read(server: LiveServer, arrived: queue.Queue[str | None]) -> None:
    for line in server.process.stderr or ():
        server.lines.append(line)
        arrived.put(line)
    arrived.put(None)


def _wait_ready(server: LiveServer, arrived: queue.Queue[str | None]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not server.log.rstrip().endswith("}'"):  # the curl line is the last of the summary
        if arrived.get(timeout=max(0.1, deadline - time.monotonic())) is None:
            raise AssertionError(f"the server ended while starting:\n{server.log}")
    found = re.search(r"serving +(\S+)/v1 ", server.log)
    assert found is not None, server.log
    server.url = found[1]
    with server.http() as http:
        assert http.get("/ready").status_code == 200, server.log


def until(condition: object, seconds: float, interval: float = 0.02) -> float:
    """Poll a callable until it is true; how long that took. Fails after so many seconds."""
    assert callable(condition)
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds} s"
        time.sleep(interval)
    return time.monotonic() - start
