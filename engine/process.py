"""The engine process: `python -m engine.process --fd N --parent PID`.

The socket N is its only connection to the world. The server starts it with a Configure frame, hears how the loading
goes, and then sends requests. The process ignores SIGINT and SIGTERM, which terminals and process managers send to
whole groups: the server drains, and ends it by a Shutdown frame. It never outlives the server: where the kernel
offers it, it is killed with its parent; everywhere, it goes when the socket closes or its parent changes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum

from engine.config import EngineConfig
from engine.constraints.grammars import GrammarStore
from engine.core.queue_policies import queue_factories
from engine.core.scheduler import Scheduler
from engine.errors import ConfigError, ModelError
from engine.executor import Executor
from engine.fake_executor import build_fake_executor
from engine.link import LinkClosed, SocketLink
from engine.logs import configure_logging
from engine.loop import EngineLoop
from engine.memory import settle_memory
from engine.types import EngineInfo, LoadProgress
from engine.wire import DUMP_SIGNAL, Configure, Fatal, Loading, Ready, WireError

logger = logging.getLogger(__name__)

_PROCESS_NAME = b"octavo-engine"
_LAST_WORDS_SECONDS = 5.0
_PARENT_CHECK_SECONDS = 1.0
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class ExitCode(IntEnum):
    """How the process ends when it ends by itself (numbers from sysexits.h)."""

    OK = 0  # told to, or the server has gone
    FAILED = 70  # the engine could not go on
    UNUSABLE = 78  # the configuration or the model cannot be served: starting again will not help


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="engine.process", description="Started by the server, not by hand.")
    parser.add_argument("--fd", type=int, required=True, help="connected stream socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the server")
    parser.add_argument("--log-format", choices=("console", "json"), default="console", help="of lines on stderr")
    options = parser.parse_args(arguments)
    os.set_inheritable(options.fd, False)
    configure_logging(options.log_format)
    _prepare_process(options.parent)
    link = SocketLink(socket.socket(fileno=options.fd))
    code = _serve(link)
    link.flush(_LAST_WORDS_SECONDS)
    return code


def _serve(link: SocketLink) -> ExitCode:
    """Load, say so, run until shut down; whatever ends the engine is told before it goes."""
    with contextlib.ExitStack() as stack:
        try:
            grammars = GrammarStore()
            stack.callback(grammars.close)
            executor, loop = _load(link, grammars)
            stack.callback(executor.close)
            loop.run()
        except LinkClosed:
            logger.info("the server has gone")
        except (ConfigError, ModelError) as error:
            link.send(Fatal("config" if isinstance(error, ConfigError) else "model", str(error)))
            return ExitCode.UNUSABLE
        except Exception as error:
            logger.critical("the engine cannot go on", exc_info=error)
            link.send(Fatal("internal", f"{type(error).__name__}: {error}"))
            return ExitCode.FAILED
    return ExitCode.OK


def _load(link: SocketLink, grammars: GrammarStore) -> tuple[Executor, EngineLoop]:
    [configure] = link.receive(None)
    if not isinstance(configure, Configure):
        raise WireError("the first frame must be Configure")
    config = configure.config

    def report(progress: LoadProgress) -> None:
        link.send(Loading(progress))

    executor, info = _build_executor(config, report, configure.life, grammars)
    loop = EngineLoop(_build_scheduler(config, info, executor), executor, link, grammars=grammars)
    settle_memory()
    link.send(Ready(info))
    return executor, loop


def _build_executor(
    config: EngineConfig, report: Callable[[LoadProgress], None], life: int, grammars: GrammarStore
) -> tuple[Executor, EngineInfo]:
    if config.executor == "fake":
        return build_fake_executor(config, report, life, grammars)
    from engine.runner.local_executor import build_executor  # loads the kernels

    return build_executor(config, report, grammars)


def _build_scheduler(config: EngineConfig, info: EngineInfo, executor: Executor) -> Scheduler:
    return Scheduler(
        executor.capacity(),
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_num_seqs=info.max_num_seqs,
        max_model_len=info.max_model_len,
        queue=queue_factories(config.max_queue_wait_steps)[config.scheduling_policy],
        preemption=config.preemption,
        prefix_cache=config.prefix_caching,
        batching=config.batching,
        step_cost=executor.step_cost(),
    )


def _prepare_process(parent_pid: int) -> None:
    """Signals and life: see the module."""
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NAME, _PROCESS_NAME, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before we could ask to be told
        os._exit(ExitCode.OK)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
