"""The server's handle on one engine process: start it, talk to it, make sure that it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from engine.config import EngineConfig
from engine.hardware import oom_kills
from engine.logs import LogFormat
from engine.wire import DUMP_SIGNAL, Command, Configure, Event, FrameSplitter, WireError, decode_event, encode

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 14  # taken from the socket in one turn of the loop: some 300 updates, 5 ms with all they cause
_STOPPED_STATES = ("T", "t")
_IMPORT_ROOT = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True, slots=True)
class Death:
    """How an engine process ended."""

    description: str  # goes on from "the engine …"
    from_outside: bool  # somebody killed or stopped it; what it was running is not to blame


class EngineProcess(asyncio.BufferedProtocol):
    """One engine process and the socket to it.

    `on_event` is called for each frame; `on_lost` once, when the connection ends or speaks nonsense. The child is
    started by the thread of the event loop, and must be: the kernel kills it when the thread that started it ends.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], on_event: Callable[[Event], None], on_lost: Callable[[], None]
    ) -> None:
        self._process = process
        self._on_event = on_event
        self._on_lost = on_lost
        self._splitter = FrameSplitter()
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._transport: asyncio.Transport | None = None
        self._oom_kills = oom_kills()
        self._exited = asyncio.Event()
        threading.Thread(
            target=self._reap, args=(asyncio.get_running_loop(),), name="engine-reaper", daemon=True
        ).start()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        life: int,
        on_event: Callable[[Event], None],
        on_lost: Callable[[], None],
        log_format: LogFormat = "console",
    ) -> EngineProcess:
        """Spawn a child and send it its configuration. Raises OSError if the system refuses a process."""
        ours, theirs = socket.socketpair()
        try:
            process = _spawn(theirs, log_format)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        _, engine = await loop.create_unix_connection(lambda: cls(process, on_event, on_lost), sock=ours)
        engine.send(Configure(config, life))
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Queue a command; never blocks. Lost without a sound if the engine has gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(command))

    def dump_stacks(self) -> None:
        """Let the process write to stderr where it is; takes effect even while it hangs in a kernel."""
        if not self._exited.is_set():
            self._process.send_signal(DUMP_SIGNAL)

    async def end(self, grace_seconds: float) -> Death:
        """Wait so long for the process to end by itself, then kill it; return when it has been reaped, never
        before: two engines at once might not fit in memory."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), grace_seconds)
        killed_in_state = None
        if not self._exited.is_set():
            killed_in_state = _process_state(self.pid)
            self._process.kill()
            await self._exited.wait()
        if self._transport is not None:
            self._transport.close()
        return self._explain(self._process.returncode, killed_in_state)

    def _explain(self, returncode: int, killed_in_state: str | None) -> Death:
        if killed_in_state is not None:  # by us, because it hung or would not go
            stopped = killed_in_state in _STOPPED_STATES
            return Death("was stopped by a signal" if stopped else "hung and was killed", from_outside=stopped)
        if returncode >= 0:
            return Death(f"exited with code {returncode}", from_outside=False)
        if -returncode == signal.SIGKILL and oom_kills() > self._oom_kills:
            return Death("was killed by the system for lack of memory", from_outside=False)
        name = signal.Signals(-returncode).name
        return Death(f"was killed by {name}", from_outside=-returncode == signal.SIGKILL)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own: no process is left a zombie, whoever ends first."""
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop may have been closed
            loop.call_soon_threadsafe(self._exited.set)

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if nbytes == _READ_BYTES and self._transport is not None:
            # The engine is ahead of us: let those who wait for its news have their turn before the next read.
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)
        try:
            events = [decode_event(body) for body in self._splitter.feed(self._buffer[:nbytes])]
        except WireError:
            logger.exception("the engine process %d speaks nonsense", self.pid)
            if self._transport is not None:
                self._transport.abort()
            return
        for event in events:
            self._on_event(event)

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()


def _spawn(theirs: socket.socket, log_format: LogFormat) -> subprocess.Popen[bytes]:
    paths = [_IMPORT_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    command = [sys.executable, "-P", "-m", "engine.process", "--fd", str(theirs.fileno())]
    return subprocess.Popen(
        [*command, "--parent", str(os.getpid()), "--log-format", log_format],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
    )


def _process_state(pid: int) -> str:
    """The letter that the kernel gives; "?" where there is no /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "?"
    return status.rpartition(")")[2].split()[0]
