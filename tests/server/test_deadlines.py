"""Requests that take too long, and what else says who goes first: priority, tenant."""

from __future__ import annotations

import asyncio
import json
import math
import time

import pytest

from server.access import ANONYMOUS, KeyRing
from server.settings import Settings
from tests.server.toy import ToyEngine, samples, saying, toy_server


async def never(step: int) -> None:
    await asyncio.Event().wait()


async def stuck_at_three(step: int) -> None:
    if step == 3:
        await never(step)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_a_request_past_its_timeout_ends_with_a_clear_error_and_is_dropped(path: str) -> None:
    engine = ToyEngine(saying("Hello"), gate=never)
    async with toy_server(engine) as toy:
        response = await toy.post(path, prompt="a", timeout=0.05)
        assert response.status_code == 504
        assert response.headers["x-should-retry"] == "false"
        error = response.json()["error"]
        assert (error["code"], error["message"]) == (
            "deadline_exceeded",
            "The request took longer than 0.05 seconds",
        )
        assert engine.dropped == [engine.requests[0].request_id]
        assert toy.server.admission.num_active == 0
        found = samples((await toy.http.get("/metrics")).text)
    assert found["octavo_requests_finished_total{reason=timeout}"] == 1


async def test_the_servers_limit_holds_for_all_and_the_smaller_counts() -> None:
    async with toy_server(ToyEngine(gate=never), request_timeout_seconds=0.05) as toy:
        for fields in ({}, {"timeout": 500.0}, {"prompt": ["a", "b"], "n": 2}):
            response = await toy.post("/v1/completions", {"prompt": "a"} | fields)
            assert (response.status_code, "0.05 seconds" in response.text) == (504, True)
        chat = await toy.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        assert chat.status_code == 504
        assert toy.server.admission.num_active == 0
        assert not toy.engine.open
    async with toy_server(ToyEngine(gate=never), request_timeout_seconds=500.0) as toy:
        assert (await toy.post("/v1/completions", prompt="a", timeout=0.05)).status_code == 504


async def test_a_stream_past_its_timeout_ends_with_an_error_event() -> None:
    async with toy_server(ToyEngine(saying("Hello"), gate=stuck_at_three)) as toy:
        response = await toy.post("/v1/completions", prompt="a", stream=True, timeout=0.1)
    assert response.status_code == 200
    *chunks, last = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hel"
    assert last["error"]["code"] == "deadline_exceeded"


async def test_a_request_in_time_is_not_touched() -> None:
    async with toy_server(ToyEngine(saying("Hello"))) as toy:
        response = await toy.post("/v1/completions", prompt="a", timeout=60)
    assert response.json()["choices"][0]["text"] == "Hello"


async def test_tokens_that_are_there_do_not_keep_a_late_request_alive() -> None:
    """The limit holds also while the engine is faster than the reader."""
    engine = ToyEngine(saying("x" * 100), gate=lambda step: time.sleep(0.01))
    async with toy_server(engine) as toy:
        response = await toy.post("/v1/completions", prompt="a", max_tokens=200, timeout=0.1)
    assert response.status_code == 504


@pytest.mark.parametrize("seconds", [0, -1, math.inf, "5"])
async def test_a_timeout_that_is_none_is_refused(seconds: object) -> None:
    async with toy_server() as toy:
        body = json.dumps({"prompt": "a", "timeout": seconds}).replace("Infinity", "1e999")
        headers = {"content-type": "application/json"}
        response = await toy.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/generate", {"prompt": "a"}),
    ],
)
async def test_the_priority_reaches_the_engine_where_it_counts(path: str, body: dict[str, object]) -> None:
    async with toy_server() as toy:
        refused = await toy.post(path, body | {"priority": 3})
        assert refused.status_code == 400
        assert "--scheduling-policy priority" in refused.json()["error"]["message"]
        assert (await toy.post(path, body | {"priority": 0})).status_code == 200
    async with toy_server(scheduling_policy="priority") as toy:
        assert (await toy.post(path, body | {"priority": -7})).status_code == 200
        assert (await toy.post(path, body)).status_code == 200
        assert [request.priority for request in toy.engine.requests] == [-7, 0]


async def test_each_key_is_a_tenant() -> None:
    async with toy_server(api_key=("a=first", "b=second")) as toy:
        for key in ("second", "first", "second"):
            headers = {"authorization": f"Bearer {key}"}
            await toy.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert [request.tenant for request in toy.engine.requests] == [2, 1, 2]
    assert KeyRing.from_settings(Settings()).tenant(ANONYMOUS) == 0
