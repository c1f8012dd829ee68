"""Schemas of the kinds people use, against the default model: what it completes is valid, what is refused is named.

`pytest -m slow tests/e2e/test_schemas.py` takes every schema with several seeds and temperatures.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from jsonschema import Draft202012Validator

from tests.e2e.live import LiveServer

CASES = json.loads((Path(__file__).parent / "data" / "schemas.json").read_text(encoding="utf-8"))
AT_ONCE = 16
MAX_TOKENS = 300


class Asked(NamedTuple):
    name: str
    schema: Any
    seed: int
    temperature: float


async def answers(server: LiveServer, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """The first choice of each; every request is served."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(http: httpx.AsyncClient, case: Asked) -> dict[str, Any]:
        form = {"type": "json_schema", "json_schema": {"name": "case", "schema": case.schema}}
        body = {
            "messages": [{"role": "user", "content": f"Answer with JSON: {case.name}. Be brief."}],
            "response_format": form,
            "max_tokens": MAX_TOKENS,
            "seed": case.seed,
            "temperature": case.temperature,
        }
        async with room:
            response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, (case.name, response.text)
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice

    async with httpx.AsyncClient(base_url=server.url, timeout=600) as http:
        return await asyncio.gather(*(one(http, case) for case in asked))


def check(asked: Sequence[Asked], choices: Sequence[dict[str, Any]]) -> Counter[str]:
    """How many ended how; every one that was completed is valid."""
    ends = Counter(choice["finish_reason"] for choice in choices)
    for case, choice in zip(asked, choices, strict=True):
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["message"]["content"])
            checker = Draft202012Validator(case.schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
            errors = [error.message for error in checker.iter_errors(value)]
            assert errors == [], (case, choice["message"]["content"])
    return ends


async def test_what_a_schema_completes_is_valid(live_server: LiveServer) -> None:
    """Each schema once; seed and temperature change along the list."""
    cases = CASES["enforced"]
    asked = [Asked(**case, seed=index, temperature=(0.0, 0.8, 1.5)[index % 3]) for index, case in enumerate(cases)]
    ends = check(asked, await answers(live_server, asked))
    assert ends["stop"] >= 0.8 * len(asked), ends


@pytest.mark.slow
async def test_every_schema_with_several_seeds_and_temperatures(live_server: LiveServer) -> None:
    runs = product(CASES["enforced"], (1, 2, 3), (0.0, 0.7, 1.0, 2.0))
    asked = [Asked(**case, seed=seed, temperature=temperature) for case, seed, temperature in runs]
    ends = check(asked, await answers(live_server, asked))
    assert ends["stop"] >= 0.8 * len(asked), ends


def test_there_are_a_hundred_schemas() -> None:
    assert len({json.dumps(case["schema"], sort_keys=True) for case in CASES["enforced"]}) >= 100


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: case["name"])
def test_what_cannot_be_enforced_is_refused_with_the_reason(live_server: LiveServer, case: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "case", "schema": case["schema"]}}
    with live_server.http() as http:
        response = http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "response_format": form}
        )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"
    assert case["because"] in response.json()["error"]["message"]
