"""Lines of the engine process."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from engine.logs import JsonFormatter

ROOT = Path(__file__).resolve().parents[2]


def test_a_line_is_one_object_with_the_request_it_is_about() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("engine.loop", logging.ERROR, "", 0, "request %d", (7,), sys.exc_info())
    record.engine_request = 7
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["event"], line["level"], line["logger"], line["engine_request"]) == (
        "request 7",
        "error",
        "engine.loop",
        7,
    )
    assert line["process"] == "engine"
    assert line["timestamp"].endswith("Z")
    assert "ValueError: two\nlines" in line["exception"]


def test_the_process_speaks_json_when_told() -> None:
    code = "from engine.logs import configure_logging as c; import logging; c('json'); logging.getLogger('a').info('b')"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(run.stderr)["event"] == "b"
