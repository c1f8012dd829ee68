"""The lines on stderr."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from server.logs import formatter
from tests.server.toy import ToyEngine, saying, toy_server

SECRET = "the prompt is nobody's business"


class Lines:
    """What has been logged, as JSON."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self.handler = logging.StreamHandler(self._stream)
        self.handler.setFormatter(formatter("json"))

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [line for line in self.all if line["logger"] == "octavo.request"]


@pytest.fixture
def lines() -> Iterator[Lines]:
    found, logger = Lines(), logging.getLogger("octavo")
    level = logger.level
    logger.addHandler(found.handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(found.handler)
    logger.setLevel(level)


async def test_a_request_is_one_line_with_all_that_matters(lines: Lines) -> None:
    async with toy_server(ToyEngine(saying("Hello"), num_cached_tokens=4), api_key=("ann=k",)) as toy:
        headers = {"authorization": "Bearer k", "x-request-id": "r1"}
        body = {"prompt": SECRET, "max_tokens": 9, "n": 2}
        response = await toy.http.post("/v1/completions", json=body, headers=headers)
    [line] = lines.requests
    times = {name: line.pop(name) for name in ("duration_ms", "first_token_ms", "queue_ms", "timestamp")}
    assert line == {
        "event": "request",
        "level": "info",
        "logger": "octavo.request",
        "request_id": "r1",
        "id": response.json()["id"],
        "engine_request": 1000,
        "key": "ann",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "choices": 2,
        "max_tokens": 9,
        "prompt_tokens": len(SECRET),
        "cached_tokens": 4,
        "generation_tokens": 12,
        "finish_reason": "stop",
    }
    assert 0 <= times["first_token_ms"] <= times["duration_ms"]
    assert SECRET not in lines.text


async def test_the_prompt_is_logged_where_it_is_asked_for(lines: Lines) -> None:
    async with toy_server(log_prompts=True) as toy:
        await toy.post("/v1/completions", prompt=[SECRET, "two"])
    assert lines.requests[0]["prompts"] == [SECRET, "two"]


async def test_a_stream_that_fails_says_why(lines: Lines) -> None:
    from engine.types import ErrorKind

    async with toy_server(ToyEngine(fail_at=(2, ErrorKind.INTERNAL))) as toy:
        await toy.post("/v1/completions", prompt="a", stream=True)
    [line] = lines.requests
    assert (line["status"], line["finish_reason"], line["generation_tokens"]) == (200, "error", 2)
    assert line["error"] == "the toy fails"


async def test_a_refusal_says_why(lines: Lines) -> None:
    async with toy_server() as toy:
        await toy.post("/v1/completions", prompt="a", model="b")
    [line] = lines.requests
    assert (line["status"], line["key"]) == (404, "anonymous")
    assert "No model 'b'" in line["error"]
    assert "prompt_tokens" not in line


async def test_an_abort_says_who_did_it(lines: Lines) -> None:
    engine = ToyEngine(saying("x" * 100))
    async with toy_server(engine) as toy:
        engine.gate = lambda step: toy.server.abort_all("bye") if step == 3 else None
        await toy.post("/v1/completions", prompt="a", max_tokens=100)
    assert (lines.requests[0]["finish_reason"], lines.requests[0]["cause"]) == ("abort", "shutdown")


async def test_slow_requests_are_marked_and_counted(lines: Lines) -> None:
    engine = ToyEngine(gate=lambda step: asyncio.sleep(0.02) if step == 0 else None)
    async with toy_server(engine, slow_request_seconds=0.01) as toy:
        await toy.post("/v1/completions", prompt="a")
        await toy.http.get("/version")
        text = (await toy.http.get("/metrics")).text
    slow, other = lines.requests
    assert (slow["slow"], slow["level"]) == (True, "warning")
    assert ("slow" in other, other["level"]) == (False, "info")
    assert "octavo_slow_requests_total 1.0" in text


async def test_probes_and_scrapes_are_not_worth_a_line(lines: Lines) -> None:
    async with toy_server() as toy:
        for path in ("/health", "/ready", "/metrics"):
            await toy.http.get(path)
    assert lines.requests == []


async def test_without_the_access_log_there_are_no_request_lines(lines: Lines) -> None:
    async with toy_server(access_log=False) as toy:
        await toy.post("/v1/completions", prompt="a")
    assert lines.requests == []


async def test_every_line_of_a_request_has_its_id(lines: Lines) -> None:
    async def gate(step: int) -> None:
        logging.getLogger("octavo.somewhere").warning("deep inside")

    async with toy_server(ToyEngine(gate=gate)) as toy:
        await toy.http.post("/v1/completions", json={"prompt": "a", "stream": True}, headers={"x-request-id": "r7"})
    inside = [line for line in lines.all if line["event"] == "deep inside"]
    assert {line["request_id"] for line in inside} == {"r7"}


def test_a_traceback_stays_on_one_line_of_json(lines: Lines) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("octavo").exception("it failed")
    [line] = lines.all
    assert "ValueError: two\nlines" in line["exception"]


def test_the_readable_form_has_the_same_facts() -> None:
    record = logging.LogRecord("octavo.request", logging.INFO, "", 0, "request", (), None)
    record.facts = {"status": 200, "generation_tokens": 7}
    line = formatter("console").format(record)
    assert all(part in line for part in ("info", "request", "status=200", "generation_tokens=7", "octavo.request"))


def test_a_readable_traceback_is_plain_and_shows_no_variables() -> None:
    """Seen under a fuzzer: rich tracebacks, with all variables, kept the event loop busy for seconds each."""
    prompt = SECRET
    try:
        raise ValueError(f"{len(prompt)} characters")
    except ValueError:
        record = logging.LogRecord("octavo", logging.ERROR, "", 0, "it failed", (), sys.exc_info())
    text = formatter("console").format(record)
    assert text.count("\n") < 10
    assert "Traceback (most recent call last)" in text
    assert "ValueError: 31 characters" in text
    assert SECRET not in text
