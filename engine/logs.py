"""Lines of the engine process on stderr: readable, or JSON with the names that the server's lines have."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["console", "json"]
REQUEST = "engine_request"  # attribute of a record: the number under which the engine knows the request it is about


def configure_logging(log_format: LogFormat) -> None:
    """Once, before anything is said."""
    handler = logging.StreamHandler(sys.stderr)
    readable = logging.Formatter("%(asctime)s engine[%(process)d] %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else readable)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class JsonFormatter(logging.Formatter):
    """One object a line, tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
            "process": "engine",
            "pid": os.getpid(),
        }
        if (number := getattr(record, REQUEST, None)) is not None:
            fields[REQUEST] = number
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)
