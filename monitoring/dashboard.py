"""The Grafana dashboard as JSON, made of the panels (`python -m monitoring.dashboard` prints it)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from monitoring.panel_kit import Panel, Query
from monitoring.panels import ROWS

_DATASOURCE = {"type": "prometheus", "uid": "octavo-prometheus"}
_HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8}


def grafana_expr(expr: str) -> str:
    """An expression in the words of the dashboard's variables."""
    return expr.replace("{I", '{instance=~"$instance"').replace("[R]", "[$__rate_interval]")


def plain_expr(expr: str, range_seconds: int) -> str:
    """An expression that Prometheus itself understands, over all instances."""
    return expr.replace("{I", '{instance=~".+"').replace("[R]", f"[{range_seconds}s]")


def dashboard() -> dict[str, Any]:
    """For Grafana 11 and later."""
    return {
        "uid": "octavo",
        "title": "Octavo",
        "description": "Are users well served, what is the engine doing, what will run out next, what do I do.",
        "tags": ["octavo", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": _annotations()},
        "templating": {"list": [_variable("model", _MODELS), _variable("instance", _INSTANCES)]},
        "panels": list(_panels()),
    }


_MODELS = "label_values(octavo_model_info, model)"
_INSTANCES = 'label_values(octavo_model_info{model=~"$model"}, instance)'


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",  # also instances whose engine has not told its model yet
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _annotations() -> list[dict[str, Any]]:
    restarts = {
        "engine restarted": "changes(octavo_engine_restarts_total{I}[1m]) > 0",
        "server started": "changes(process_start_time_seconds{I}[1m]) > 0",
    }
    return [
        {
            "name": name,
            "datasource": _DATASOURCE,
            "enable": True,
            "iconColor": "red" if name.startswith("engine") else "blue",
            "expr": grafana_expr(expr),
            "titleFormat": name,
            "textFormat": "{{instance}}",
        }
        for name, expr in restarts.items()
    ]


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for row in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
        }
        top += 1
        left = line_height = 0
        for panel in row.panels:
            if left + panel.width > 24:
                left, top, line_height = 0, top + line_height, 0
            number += 1
            height = _HEIGHTS[panel.kind]
            yield _panel(panel, number, {"x": left, "y": top, "w": panel.width, "h": height})
            left, line_height = left + panel.width, max(line_height, height)
        top += line_height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "targets": [_target(panel, query, index) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _options(panel),
    }


def _target(panel: Panel, query: Query, index: int) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "editorMode": "code",
        "expr": grafana_expr(query.expr),
        "legendFormat": query.legend or "__auto",
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        "range": True,
        "exemplar": panel.unit == "s" and "_bucket" in query.expr,  # dots that lead to traces, where there are any
    }


def _field_defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.unit == "percentunit":
        defaults |= {"min": 0, "max": 1, "decimals": 2}
    elif panel.kind == "timeseries":
        defaults["min"] = 0
    if panel.steps:
        steps = [{"color": color, "value": value} for color, value in panel.steps]
        defaults |= {"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "stat":
            calculation = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"reduceOptions": calculation, "colorMode": "background", "graphMode": "area", "textMode": "auto"}
        case "heatmap":
            return {
                "calculate": False,
                "cellGap": 1,
                "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "scale": "exponential"},
                "yAxis": {"axisPlacement": "left", "unit": panel.unit},
                "tooltip": {"mode": "single", "yHistogram": True},
                "legend": {"show": False},
            }
        case "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))  # noqa: T201
