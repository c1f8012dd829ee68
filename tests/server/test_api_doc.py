"""docs/api.md says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from server.errors import ERROR_TABLE
from server.protocol.table import ENDPOINTS, status, tables
from tests.server.toy import toy_server

DOC = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}
REFUSED_VALUES: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "tools": [{"type": "function"}],
    "context_management": [{"type": "compaction"}],
    "conversation": "c",
    "previous_response_id": "r",
}


def test_the_field_tables_are_those_of_the_models() -> None:
    """To mend: replace what follows the comment by the output of `python -m server.protocol.table`."""
    assert DOC.endswith(tables())


async def test_every_endpoint_is_listed_and_none_that_is_not_there() -> None:
    async with toy_server() as toy:
        paths = set(toy.app.openapi()["paths"])
    named = set(re.findall(r"(/[\w/{}]*)`", DOC.partition("| endpoint |")[2].partition("## Models")[0]))
    assert {path.replace(":path", "") for path in paths} == named - {"/docs"}


def test_every_error_code_is_listed() -> None:
    for row in ERROR_TABLE.values():
        assert str(row.status) in DOC
        if row.code is not None:
            assert f"`{row.code}`" in DOC


@pytest.mark.parametrize("path", list(MINIMAL))
async def test_fields_that_are_called_refused_are_refused_by_their_name(path: str) -> None:
    model = next(model for title, model in ENDPOINTS if path in title.removeprefix("POST ").split(", "))
    async with toy_server() as toy:
        for name, field in model.model_fields.items():
            if status(field) != "refused":
                continue
            value = REFUSED_VALUES.get(name, {"type": "x"})
            response = await toy.post(path, MINIMAL[path] | {name: value})
            assert response.status_code == 400, name
            assert response.json()["error"]["param"] == name
        assert (await toy.post(path, MINIMAL[path])).status_code == 200


@pytest.mark.parametrize("path", list(MINIMAL))
async def test_fields_that_are_called_ignored_change_nothing(path: str) -> None:
    model = next(model for title, model in ENDPOINTS if path in title.removeprefix("POST ").split(", "))
    values: dict[str, Any] = {
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_options": {"mode": "explicit"},
        "max_tool_calls": 3,
        "service_tier": "auto",
    }
    async with toy_server() as toy:
        for name, field in model.model_fields.items():
            if status(field) == "ignored":
                response = await toy.post(path, MINIMAL[path] | {name: values.get(name, "x"), "seed": 1})
                assert response.status_code == 200, (name, response.text)
    requests = {json.dumps([list(r.prompt_token_ids), r.sampling.max_tokens]) for r in toy.engine.requests}
    assert len(requests) <= 1
