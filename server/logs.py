"""Lines on stderr, readable or JSON; one for each request.

Everything goes through the standard library's loggers; structlog only turns records into lines. Each line that is
written while a request is served carries its id.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson
import structlog
from structlog.typing import EventDict, Processor

from server.door import Call

LogFormat = Literal["console", "json"]
_FACTS = "facts"  # attribute of a record: what goes into the line beside its message
_PROBES = frozenset({"/health", "/ready", "/metrics"})
_requests = logging.getLogger("octavo.request")


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Once, before anything is said."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    quiet = logging.WARNING if level == "info" else level.upper()
    for name in ("uvicorn", "httpx", "opentelemetry"):
        logging.getLogger(name).setLevel(quiet)


def formatter(log_format: LogFormat) -> logging.Formatter:
    """Makes lines of records: time in UTC, level, logger, request id where there is one, message, facts."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_facts,
    ]
    if log_format == "json":
        last: list[Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_to_json),
        ]
    else:
        # Plain tracebacks: rich ones take the event loop for seconds, and show what is in the variables.
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(8, sys.stderr.isatty(), exception_formatter=plain)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
    )


def _add_facts(logger: Any, method: str, event: EventDict) -> EventDict:
    facts: Mapping[str, object] = getattr(event["_record"], _FACTS, {})
    event.update(facts)
    return event


def _to_json(event: EventDict, default: Any = None, **_: Any) -> str:
    return orjson.dumps(event, default=default or str).decode()


@dataclass(frozen=True)
class RequestLog:
    """One line a request: at `info`; at `warning` if it was slow or the server failed; probes at `debug`."""

    enabled: bool
    slow_seconds: float

    def is_slow(self, call: Call, seconds: float) -> bool:
        """Whether it ran the model and took longer than it should."""
        return bool(call.facts) and seconds > self.slow_seconds

    def write(self, call: Call, method: str, route: str, status: int, seconds: float) -> None:
        """After the last byte of the answer."""
        if not self.enabled:
            return
        slow = self.is_slow(call, seconds)
        level = logging.WARNING if slow or (status >= 500 and status != 503) else logging.INFO
        if route in _PROBES and status < 500:
            level = logging.DEBUG
        if not _requests.isEnabledFor(level):
            return
        facts: dict[str, object] = {
            "request_id": call.id,
            "key": call.key,
            "method": method,
            "route": route,
            "status": status,
            "duration_ms": round(seconds * 1e3, 1),
            **call.facts,
        }
        if slow:
            facts["slow"] = True
        if call.trace is not None:
            facts["trace_id"] = call.trace.exemplar["trace_id"]
        _requests.log(level, "request", extra={_FACTS: facts})
