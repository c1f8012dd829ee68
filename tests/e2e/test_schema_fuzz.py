"""Requests made from /openapi.json, valid and not: no answer is a 5xx or breaks the schema that it is documented by."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.e2e.live import LiveServer

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def fuzz(server: LiveServer, examples: int) -> Counter[int]:
    """How often each status was answered."""
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)

        def check(case: Any) -> None:
            response = case.call()
            statuses[response.status_code] += 1
            # A 504 is what a request gets whose own `timeout` is over.
            own_time_over = response.status_code == 504
            case.validate_response(response, checks=CHECKS[1:] if own_time_over else CHECKS)

        settings = hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        hypothesis.given(case=found.ok().as_strategy())(settings(check))()
    with server.http() as http:
        assert http.get("/ready").status_code == 200
    return statuses


def test_a_few_hundred_requests(fake_server: LiveServer) -> None:
    statuses = fuzz(fake_server, examples=10)
    assert statuses.total() >= 100
    assert statuses[200] > 0
    assert statuses[400] > 0


@pytest.mark.slow
def test_more_than_two_thousand_requests(fake_server: LiveServer) -> None:
    assert fuzz(fake_server, examples=160).total() >= 2000
