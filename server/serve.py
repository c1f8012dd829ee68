"""`octavo serve`: the socket, the two ways out (drain on the first signal, at once on the second), what is said."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn
from rich.console import Console

from engine.errors import EngineError
from engine.memory import settle_memory
from engine.types import LoadProgress
from server.app import create_app
from server.http_protocol import bounded_protocol
from server.metrics_listener import metrics_app
from server.model_store import ModelNotFound
from server.progress import progress_shown
from server.settings import Settings, SettingsProblem
from server.startup import load_model, summary
from server.state import ServedModel, Server

logger = logging.getLogger("octavo")
_GOODBYE_SECONDS = 2.0  # for the last error events to be written after the drain time is over


class ServeProblem(Exception):
    """The server cannot start; the message says why."""


def serve(settings: Settings) -> int:
    """Serve until told to stop; the process's exit code."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        sock = _bind(settings.host, settings.port, "--port")
        return _Session(settings, sock, console).run()
    except (ServeProblem, SettingsProblem) as error:
        console.print(f"octavo: {error}", style="bold red", markup=False)
        return 1


def _bind(host: str, port: int, flag: str) -> socket.socket:
    """A bound socket, so that a port in use is known before anything is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ServeProblem(f"cannot listen on {host}:{port}: {error.strerror}. Choose another {flag}") from error
    sock.set_inheritable(False)
    return sock


class _QuietServer(uvicorn.Server):
    """uvicorn's server, with the signals left to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Session:
    """One life of the server process."""

    def __init__(self, settings: Settings, sock: socket.socket, console: Console) -> None:
        self._settings = settings
        self._sock = sock
        self._console = console
        self._exit_code = 0
        self._stopping: asyncio.Task[None] | None = None
        app = create_app(settings, self._load, self._fail)
        self._server: Server = app.state.server
        self._http = _QuietServer(self._config(app))
        self._extra: list[tuple[_QuietServer, socket.socket]] = []
        if settings.metrics_port is not None:
            listener = _bind(settings.metrics_host, settings.metrics_port, "--metrics-port")
            config = uvicorn.Config(metrics_app(self._server), lifespan="off", log_config=None, server_header=False)
            self._extra.append((_QuietServer(config), listener))

    def _config(self, app: object) -> uvicorn.Config:
        settings = self._settings
        return uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=bounded_protocol(int(settings.max_head_bytes), settings.head_timeout_seconds),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.http_keep_alive_seconds,
            timeout_graceful_shutdown=5,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
            backlog=2048,
        )

    def run(self) -> int:
        with asyncio.Runner(loop_factory=self._http.config.get_loop_factory()) as runner:
            runner.run(self._run())
        return self._exit_code

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        extra = [asyncio.create_task(server.serve([sock])) for server, sock in self._extra]
        try:
            await self._http.serve([self._sock])
        finally:
            for server, _ in self._extra:
                server.should_exit = True
            await asyncio.gather(*extra)

    # Stopping

    def _on_signal(self, number: int) -> None:
        if self._stopping is not None:
            os._exit(128 + number)  # the engine process goes when its parent does
        logger.info("finishing what runs; once more to stop at once")
        self._server.draining = True
        self._stopping = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """The listener stays open meanwhile: new requests get a 503, and /ready says no."""
        admission = self._server.admission
        try:
            async with asyncio.timeout(self._settings.drain_timeout_seconds):
                await admission.wait_idle()
        except TimeoutError:
            logger.warning("%d requests did not end in time", admission.num_active)
            self._server.abort_all("The server is shutting down")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await admission.wait_idle()
        self._http.should_exit = True

    # Starting

    async def _load(self, report: Callable[[LoadProgress], None]) -> ServedModel:
        with progress_shown(self._console) as show:

            def both(progress: LoadProgress) -> None:
                report(progress)
                show(progress)

            model = await load_model(self._settings, both)
        if (info := model.engine.info) is not None:
            self._say(summary(self._settings, model, info, self._base_url()))
        settle_memory()
        return model

    def _say(self, text: str) -> None:
        """To people; where lines are JSON, each is one."""
        if self._settings.log_format == "console":
            self._console.print(text, markup=False)
            return
        for line in filter(None, text.splitlines()):
            logger.info(line.strip())

    def _fail(self, error: Exception) -> None:
        if isinstance(error, ModelNotFound | EngineError):
            self._console.print(f"octavo: {error}", style="bold red", markup=False)
        else:
            logger.error("the model could not be loaded", exc_info=error)
        self._exit_code = 1
        self._http.should_exit = True

    def _base_url(self) -> str:
        host, port = self._sock.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        scheme = "http" if self._settings.tls_certificate is None else "https"
        return f"{scheme}://{host}:{port}{self._settings.root_path}"
