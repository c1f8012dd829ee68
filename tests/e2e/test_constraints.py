"""Constrained answers in company: beside free streams, with n, seeds, stops and penalties, over the engine's death; and
bad grammars beside a stream that must not notice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import validate

from tests.conformance.bystander import Bystander
from tests.e2e.live import LiveServer, serving

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Describe a person as JSON."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "fish"]}, "minItems": 1, "maxItems": 4},
        "motto": {"type": "string", "maxLength": 60},
    },
    "required": ["name", "age", "pets", "motto"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
FORMED: dict[str, Any] = {"messages": ASK, "response_format": FORM, "max_tokens": 300, "return_token_ids": True}
BAD: tuple[dict[str, Any], ...] = (
    {"guided_regex": "(a"},
    {"guided_regex": "(?<=a)b"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}},
    {"guided_json": {"enum": ["x" * 1000 + str(i) for i in range(5000)]}},
    {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
    {"guided_grammar": "start: nothing"},
    {"guided_grammar": "root ::= " + "(" * 5000},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]},
)
LARGE: dict[str, Any] = {"guided_json": {"enum": [f"value {i}" for i in range(10_000)]}, "max_tokens": 20}


async def choices(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await http.post(CHAT, json=FORMED | fields)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


async def test_neighbours_do_not_change_a_constrained_answer(live_server: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=live_server.url, timeout=120) as http:
        alone = [await choices(http, seed=seed) for seed in range(4)]

        async def free(number: int) -> None:
            body = {"prompt": f"{number} is", "max_tokens": 20 + 15 * number, "ignore_eos": True, "seed": number}
            assert (await http.post("/v1/completions", json=body)).status_code == 200

        async with asyncio.TaskGroup() as group:
            neighbours = [group.create_task(free(number)) for number in range(8)]
            together = [group.create_task(choices(http, seed=seed)) for seed in range(4)]
    assert all(neighbour.done() for neighbour in neighbours)
    assert [task.result() for task in together] == alone


async def test_constraints_hold_with_several_choices_penalties_and_logprobs(live_server: LiveServer) -> None:
    fields: dict[str, Any] = {
        "n": 3,
        "seed": 5,
        "temperature": 1.2,
        "top_p": 0.95,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 10,
        "logprobs": True,
        "top_logprobs": 2,
    }
    async with httpx.AsyncClient(base_url=live_server.url, timeout=120) as http:
        first, again = await choices(http, **fields), await choices(http, **fields)
    assert first == again
    assert len({choice["message"]["content"] for choice in first}) > 1
    for choice in first:
        assert choice["finish_reason"] == "stop"
        validate(json.loads(choice["message"]["content"]), PERSON)
        told = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
        assert told.decode().startswith(choice["message"]["content"])


async def test_a_stop_string_ends_a_constrained_answer(live_server: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=live_server.url, timeout=120) as http:
        [whole] = await choices(http, temperature=0)
        [stopped] = await choices(http, temperature=0, stop='"age"')
    assert stopped["message"]["content"] == whole["message"]["content"].partition('"age"')[0]
    assert stopped["finish_reason"] == "stop"


async def test_constrained_streams_survive_the_death_of_the_engine(default_model_path: Path) -> None:
    with serving() as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            undisturbed = [await choices(http, seed=seed) for seed in range(4)]
            group = [asyncio.create_task(choices(http, seed=seed)) for seed in range(4)]
            while (await http.get("/health")).json()["running"] < 4:
                pass  # it happens in another process
            os.kill((await http.get("/debug/engine")).json()["pid"], signal.SIGKILL)
            assert await asyncio.gather(*group) == undisturbed
        assert server.metric("octavo_engine_restarts_total") == 1


async def attack(http: httpx.AsyncClient) -> None:
    """50 requests at once that cannot be served, and one that is large and can."""
    bad = [http.post(CHAT, json={"messages": ASK} | BAD[number % len(BAD)]) for number in range(50)]
    *refused, served = await asyncio.gather(*bad, http.post(CHAT, json={"messages": ASK} | LARGE))
    for response in refused:
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"]
    assert served.status_code == 200


async def test_bad_grammars_do_not_touch_a_bystander(live_server: LiveServer) -> None:
    with Bystander(live_server.port) as alone:
        pass
    with Bystander(live_server.port) as beside:
        async with httpx.AsyncClient(base_url=live_server.url, timeout=120) as http:
            for _ in range(3):
                await attack(http)
    assert alone.seen.faults == beside.seen.faults == []
    assert {tuple(answer) for answer in beside.seen.answers} == {tuple(alone.seen.answers[0])}


@pytest.mark.slow
async def test_the_gaps_of_a_bystander_stay_short(live_server: LiveServer) -> None:
    """By command, as times on a busy machine say little."""
    with Bystander(live_server.port) as alone:
        pass
    with Bystander(live_server.port) as beside:
        async with httpx.AsyncClient(base_url=live_server.url, timeout=120) as http:
            for _ in range(10):
                await attack(http)
    assert beside.seen.longest_gap < max(0.2, 5 * alone.seen.longest_gap)
