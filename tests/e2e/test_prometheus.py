"""A real Prometheus scrapes a live server: every expression of the dashboard and of the rules has data."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitoring.dashboard import plain_expr
from monitoring.panels import ROWS
from tests.e2e.live import serving, until
from tests.e2e.prometheus_stack import Prometheus, load, prometheus
from tests.monitoring.test_alerts import ALERTS, RULES
from tests.monitoring.tools import tool
from tests.server.otlp_receiver import receiving

LOAD_SECONDS = 15.0
RANGE_SECONDS = 12
QUERIES = [(panel, query) for row in ROWS for panel in row.panels if not panel.needs for query in panel.queries]


@pytest.fixture(scope="module")
def watched(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has watched a server under load."""
    program = tool("prometheus")
    with (
        receiving() as receiver,
        serving("--executor", "fake", "--fake-step-seconds", "0.004", "--otlp-endpoint", receiver.url) as server,
        prometheus(program, server, tmp_path_factory.mktemp("prometheus")) as found,
        load(server),
    ):
        until(lambda: found.query('up{job="octavo"} == 1'), 30, 0.2)
        time.sleep(LOAD_SECONDS)  # rates need samples; nothing else is to be waited for
        yield found


def test_every_panel_has_data(watched: Prometheus) -> None:
    empty = [
        (panel.title, query.expr)
        for panel, query in QUERIES
        if not watched.query(plain_expr(query.expr, RANGE_SECONDS))
    ]
    assert empty == []


def test_rates_are_not_all_zero(watched: Prometheus) -> None:
    """That there is data does not prove that it is the right one."""
    for title in ("Output tokens a second", "Requests a second", "Steps a second", "Tokens through the model"):
        panel = next(panel for panel, _ in QUERIES if panel.title == title)
        for sample in watched.query(plain_expr(panel.queries[0].expr, RANGE_SECONDS)):
            assert float(sample["value"][1]) > 0, title
    (ready,) = watched.query("octavo_ready")
    assert ready["value"][1] == "1"
    total = watched.query("sum without (state) (octavo_kv_blocks)")
    info = watched.query("octavo_kv_capacity_tokens / 16")
    assert [sample["value"][1] for sample in total] == [sample["value"][1] for sample in info]


def test_exemplars_are_kept(watched: Prometheus) -> None:
    name = "octavo_time_to_first_token_seconds_bucket"
    [found] = watched.get("query_exemplars", query=name, start=str(time.time() - 60), end=str(time.time()))[:1]
    assert found["seriesLabels"]["__name__"] == name
    assert all(re.fullmatch("[0-9a-f]{32}", exemplar["labels"]["trace_id"]) for exemplar in found["exemplars"])


def test_every_rule_is_healthy_and_none_fires_on_a_healthy_server(watched: Prometheus) -> None:
    until(lambda: watched.query("octavo:late_token_ratio:rate6h"), 30, 0.5)
    groups = watched.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules if rule["type"] == "alerting"} == set(ALERTS)
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    paging = [rule["name"] for rule in rules if rule["type"] == "alerting" and rule["state"] == "firing"]
    assert paging == []


def test_every_series_that_a_rule_reads_is_there(watched: Prometheus) -> None:
    """An alert that does not fire returns nothing; what it looks at must be there all the same."""
    names = set(re.findall(r"\b(?:octavo_\w+|octavo:\w+:\w+|process_\w+|up)\b(?=[{\[ ]|\|)", RULES.read_text()))
    names |= {"octavo_requests_finished_total", "octavo_refusals_total"}
    missing = sorted(name for name in names if not watched.query(name) and "accelerator" not in name)
    assert missing == []
    for rule in ALERTS.values():
        watched.query(rule["expr"])  # fails if Prometheus does not take it
