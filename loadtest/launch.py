"""Starts servers for a comparison, waits until they are healthy, ends them by their process group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from loadtest.client import Client
from loadtest.connection import ConnectionLost
from loadtest.errors import BenchError
from loadtest.target import Target, make_target

_POLL_SECONDS = 0.1
_TERM_SECONDS = 30.0
_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """`name=URL` of a running server, or `name=command` of one to start. `{port}` in a command is filled in."""

    name: str
    url: str | None = None
    command: str | None = None


def parse_server(text: str) -> ServerSpec:
    """Reads a `--server` value. Raises BenchError for one that is neither."""
    name, separator, rest = text.partition("=")
    if not separator or not name or not rest.strip():
        raise BenchError(f"--server {text!r}: expected 'name=http://…' or 'name=command with {{port}}'")
    if rest.startswith(("http://", "https://")):
        return ServerSpec(name, url=rest)
    if "{port}" not in rest:
        raise BenchError(f"--server {name}: the command needs {{port}} where its port goes: {rest}")
    return ServerSpec(name, command=rest)


class LaunchedServer:
    """A server process of ours. Its output goes to a log file, whose end is shown if it fails to start."""

    def __init__(self, spec: ServerSpec) -> None:
        if spec.command is None:
            raise ValueError("a server with a URL is not ours to start")
        self.name = spec.name
        port = _free_port()
        self.command = spec.command.replace("{port}", str(port))
        self.url = f"http://127.0.0.1:{port}"
        self.startup_seconds = 0.0
        environment, arguments = _split(self.command)
        self._log: IO[bytes] = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - open until stop()
        self._began_at = time.monotonic()
        try:
            self._process = subprocess.Popen(
                arguments,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its children (workers) share its group and are ended with it
            )
        except OSError as error:
            self._log.close()
            raise BenchError(f"cannot start {spec.name}: {error}") from error

    @property
    def pid(self) -> int:
        """Root of the server's process tree."""
        return self._process.pid

    async def healthy(self, timeout_seconds: float) -> Target:
        """Waits until it can serve. Raises BenchError with the log's end if the process dies or the time is
        over; it is then no longer running."""
        target = make_target(self.url)
        with contextlib.closing(Client(target, time.perf_counter, "completions", 5.0)) as client:
            await self._poll(client, timeout_seconds)
        return target

    def stop(self) -> None:
        """SIGTERM to the process group, then SIGKILL to what is left of it; returns when the process is gone."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERM_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    async def _poll(self, client: Client, timeout_seconds: float) -> None:
        while time.monotonic() - self._began_at < timeout_seconds:
            if self._process.poll() is not None:
                raise BenchError(f"{self.name} ended with code {self._process.returncode}:\n{self._tail()}")
            with contextlib.suppress(OSError, ConnectionLost):
                if await _serves(client):
                    self.startup_seconds = time.monotonic() - self._began_at
                    return
            await asyncio.sleep(_POLL_SECONDS)
        tail = self._tail()
        self.stop()
        raise BenchError(f"{self.name} was not healthy within {timeout_seconds:g} s:\n{tail}")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        self._log.flush()
        data = Path(self._log.name).read_bytes()
        return data[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")


async def _serves(client: Client) -> bool:
    """200 from /health, and no 503 from /ready: some servers are alive before they can serve."""
    health, _ = await client.fetch("GET", "/health")
    if health != 200:
        return False
    ready, _ = await client.fetch("GET", "/ready")
    return ready != 503


def _split(command: str) -> tuple[dict[str, str], list[str]]:
    """Leading NAME=value words as environment, the rest as arguments. Raises BenchError if nothing is left."""
    words = shlex.split(command)
    environment = {}
    while words and "=" in words[0] and words[0].split("=", 1)[0].isidentifier():
        name, value = words.pop(0).split("=", 1)
        environment[name] = value
    if not words:
        raise BenchError(f"no command in {command!r}")
    return environment, words


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
