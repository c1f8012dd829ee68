"""The dashboard's file is what the panels make, names only metrics that exist, and tells people what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.catalogue import SPECS
from monitoring.dashboard import dashboard
from monitoring.panels import ROWS
from tests.monitoring.test_alerts import ALERTS

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "monitoring" / "grafana" / "dashboards" / "octavo.json"
PANELS = [panel for row in ROWS for panel in row.panels]
FOREIGN = r"process_\w+|octavo_engine_process_\w+"


def names_in(expr: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(?:octavo|process)_\w+", expr)}


def test_the_file_is_up_to_date() -> None:
    """To mend: python -m monitoring.dashboard > monitoring/grafana/dashboards/octavo.json"""
    assert json.loads(FILE.read_text(encoding="utf-8")) == dashboard()


def test_grafanas_own_types_know_every_part_of_it() -> None:
    """Read into the classes that Grafana generates from its schema and written again, only that is lost which the
    schema leaves to data sources or which came after Grafana 10.1, whose types these are."""
    register_default_plugins()
    made = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(dashboard())))
    lost = {re.sub(r"/\d+", "", path) for path in lost_paths(dashboard(), made)}
    assert lost == {
        "/annotations/list/titleFormat",
        "/annotations/list/textFormat",
        "/templating/list/definition",
        "/panels/options/tooltip/mode",
    }


def lost_paths(ours: Any, made: Any, path: str = "") -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(made, dict):
        for key, value in ours.items():
            yield from lost_paths(value, made.get(key), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(made, list) and len(ours) == len(made):
        for index, pair in enumerate(zip(ours, made, strict=True)):
            yield from lost_paths(*pair, f"{path}/{index}")
    elif ours != made:
        yield path


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_panel_asks_for_what_exists_and_says_what_to_do(panel: Any) -> None:
    exported = {spec.full_name for spec in SPECS} | {spec.full_name.removesuffix("_total") for spec in SPECS}
    for query in panel.queries:
        for name in names_in(query.expr):
            assert name in exported or re.fullmatch(FOREIGN, name), name
        assert "{I" in query.expr, "must follow the instance variable"
    assert len(panel.description.split()) >= 8
    assert panel.width <= 24


def test_runbook_sections_that_panels_name_exist() -> None:
    named = {name for panel in PANELS for name in re.findall(r"Octavo[A-Z]\w+", panel.description)}
    assert named <= set(ALERTS)


def test_all_metrics_but_infos_and_limits_are_on_the_dashboard_or_in_an_alert() -> None:
    """A metric that nobody looks at is not worth exporting."""
    shown = {name for panel in PANELS for query in panel.queries for name in names_in(query.expr)}
    shown |= {name for rule in ALERTS.values() for name in names_in(rule["expr"])}
    known_elsewhere = {  # for ad-hoc questions, and for the load test's time lines
        "octavo_build_info",
        "octavo_model_info",
        "octavo_kv_capacity_tokens",
        "octavo_max_step_tokens",
        "octavo_oldest_waiting_steps",
        "octavo_step_prefill_tokens",
        "octavo_step_decode_tokens",
        "octavo_http_request_duration_seconds",
        "octavo_prompt_tokens_total",
        "octavo_cached_prompt_tokens_total",
    }
    assert {spec.full_name for spec in SPECS} - shown == known_elsewhere


def test_panels_do_not_overlap_and_fill_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
