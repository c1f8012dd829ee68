"""Where load may go, and what is sent there."""

from __future__ import annotations

import orjson
import pytest

from loadtest.errors import BenchError
from loadtest.payload import generation_request
from loadtest.records import Request
from loadtest.target import make_target


@pytest.mark.parametrize("url", ["http://192.0.2.1:8000", "http://[2001:db8::1]:80", "https://198.51.100.7/v1"])
def test_other_machines_are_refused(url: str) -> None:
    with pytest.raises(BenchError, match="--allow-remote"):
        make_target(url)


def test_other_machines_are_accepted_when_asked_for() -> None:
    target = make_target("https://192.0.2.1/llm/v1/", allow_remote=True)
    assert (target.base_url, target.address, target.port, target.path) == (
        "https://192.0.2.1/llm",
        "192.0.2.1",
        443,
        "/llm",
    )


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1:8000/v1", "http://localhost:8000/"])
def test_this_machine_is_accepted(url: str) -> None:
    target = make_target(url)
    assert (target.port, target.path, target.tls) == (8000, "", False)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "http://127.0.0.1:99999"])
def test_a_bad_url_is_said_to_be_one(url: str) -> None:
    with pytest.raises(BenchError, match="bad URL"):
        make_target(url)


def test_the_body_is_greedy_streamed_and_can_be_overridden() -> None:
    target = make_target(
        "http://127.0.0.1:1", model="m", api_key="secret", extra_body={"ignore_eos": None, "temperature": 0.7}
    )
    request = Request("a", 0, 0, (("system", "one"), ("user", "two")), 5, 2)
    head, _, body = generation_request(target, request, "completions").partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"authorization: Bearer secret" in head
    assert orjson.loads(body) == {
        "model": "m",
        "prompt": "one two",
        "max_tokens": 5,
        "temperature": 0.7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "secret" not in repr(target)
