"""monitoring/alerts.yml: valid, explained in the runbook, and each alert seen both firing and quiet by promtool."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.tools import tool

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "monitoring" / "alerts.yml"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
I = 'instance="a"'  # noqa: E741
FINISHED = 'octavo_requests_finished_total{instance="a",reason="%s"}'
LATE = {"FirstToken": ("time_to_first_token", "2.0"), "TokenGap": ("inter_token", "0.2")}

Series = dict[str, str]  # series → values in promtool's notation, one a minute
# alert → (series that make it fire, series that do not, the firing series' labels)
CASES: dict[str, tuple[Series, Series]] = {
    # 2 % of answers fail: 20 times the budget
    "OctavoErrorBudgetBurnsFast": (
        {FINISHED % "stop": "0+98x120", FINISHED % "error": "0+2x120"},
        {FINISHED % "stop": "0+1000x120", FINISHED % "error": "0+1x120"},
    ),
    # 0.8 %: 8 times
    "OctavoErrorBudgetBurnsSlowly": (
        {FINISHED % "stop": "0+992x420", FINISHED % "error": "0+8x420"},
        {FINISHED % "stop": "0+998x420", FINISHED % "error": "0+2x420"},
    ),
    "OctavoDown": ({f'up{{job="octavo",{I}}}': "0x10"}, {f'up{{job="octavo",{I}}}': "1x10"}),
    "OctavoNotReady": ({f"octavo_ready{{{I}}}": "0x10"}, {f"octavo_ready{{{I}}}": "0x4 1x6"}),
    "OctavoEngineRestarted": (
        {f"octavo_engine_restarts_total{{{I}}}": "0x5 1x5"},
        {f"octavo_engine_restarts_total{{{I}}}": "1x20"},
    ),
    "OctavoEngineRestarting": (
        {f"octavo_engine_restarts_total{{{I}}}": "0x5 1x1 2x1 3x1 4x4"},
        {f"octavo_engine_restarts_total{{{I}}}": "0x5 1x8"},
    ),
    "OctavoEngineStuck": (
        {f"octavo_requests_running{{{I}}}": "3x10", f"octavo_engine_steps_total{{{I}}}": "0+100x3 300x10"},
        {f"octavo_requests_running{{{I}}}": "3x10", f"octavo_engine_steps_total{{{I}}}": "0+1x10"},
    ),
    "OctavoQueueOld": (
        {f"octavo_oldest_waiting_seconds{{{I}}}": "0+15x10"},
        {f"octavo_oldest_waiting_seconds{{{I}}}": "29x10"},
    ),
    "OctavoKVExhausted": (
        {f"octavo_kv_usage_ratio{{{I}}}": "0.99x12", f"octavo_requests_waiting{{{I}}}": "4x12"},
        {f"octavo_kv_usage_ratio{{{I}}}": "0.99x12", f"octavo_requests_waiting{{{I}}}": "0x12"},
    ),
    "OctavoPreempting": (
        {f'octavo_preemptions_total{{{I},kind="recompute"}}': "0+60x12"},
        {f'octavo_preemptions_total{{{I},kind="recompute"}}': "0+6x12"},
    ),
    "OctavoRefusing": (
        {f'octavo_refusals_total{{{I},reason="queue_full"}}': "0+60x12"},
        {f'octavo_refusals_total{{{I},reason="invalid"}}': "0+60x12"},
    ),
    "OctavoEventLoopLags": (
        {
            f'octavo_event_loop_lag_seconds_bucket{{{I},le="0.2"}}': "0+500x12",
            f'octavo_event_loop_lag_seconds_bucket{{{I},le="0.5"}}': "0+600x12",
            f'octavo_event_loop_lag_seconds_bucket{{{I},le="+Inf"}}': "0+600x12",
        },
        {
            f'octavo_event_loop_lag_seconds_bucket{{{I},le="0.2"}}': "0+599x12",
            f'octavo_event_loop_lag_seconds_bucket{{{I},le="0.5"}}': "0+600x12",
            f'octavo_event_loop_lag_seconds_bucket{{{I},le="+Inf"}}': "0+600x12",
        },
    ),
    "OctavoNoTraffic": (
        {f'octavo_http_requests_total{{{I},method="POST",code="200"}}': "0+60x80 4800x40"},
        {f'octavo_http_requests_total{{{I},method="POST",code="200"}}': "0+60x120"},
    ),
    "OctavoFileDescriptorsShort": (
        {f"process_open_fds{{{I}}}": "900x10", f"process_max_fds{{{I}}}": "1024x10"},
        {f"process_open_fds{{{I}}}": "90x10", f"process_max_fds{{{I}}}": "1024x10"},
    ),
    "OctavoLatencyHigh": (
        {
            f'octavo_request_duration_seconds_bucket{{{I},le="30.0"}}': "0+90x20",
            f'octavo_request_duration_seconds_bucket{{{I},le="60.0"}}': "0+100x20",
            f'octavo_request_duration_seconds_bucket{{{I},le="+Inf"}}': "0+100x20",
        },
        {
            f'octavo_request_duration_seconds_bucket{{{I},le="30.0"}}': "0+100x20",
            f'octavo_request_duration_seconds_bucket{{{I},le="60.0"}}': "0+100x20",
            f'octavo_request_duration_seconds_bucket{{{I},le="+Inf"}}': "0+100x20",
        },
    ),
    "OctavoErrorRateHigh": (
        {
            f'octavo_http_requests_total{{{I},code="200",route="/v1/completions"}}': "0+998x12",
            f'octavo_http_requests_total{{{I},code="500",route="/v1/completions"}}': "0+2x12",
        },
        {
            f'octavo_http_requests_total{{{I},code="200",route="/v1/completions"}}': "0+998x12",
            f'octavo_http_requests_total{{{I},code="503",route="/ready"}}': "0+500x12",
        },
    ),
    "OctavoQueueLong": ({f"octavo_requests_waiting{{{I}}}": "21x6"}, {f"octavo_requests_waiting{{{I}}}": "20x6"}),
    "OctavoAcceleratorIdle": (
        {
            f'octavo_accelerator_utilization_ratio{{{I},device="0"}}': "0.5x12",
            f"octavo_requests_waiting{{{I}}}": "4x12",
        },
        {
            f'octavo_accelerator_utilization_ratio{{{I},device="0"}}': "0.5x12",
            f"octavo_requests_waiting{{{I}}}": "0x12",
        },
    ),
}
for _name, (_metric, _le) in LATE.items():

    def _series(in_time: int, minutes: int, metric: str = _metric, le: str = _le) -> Series:
        return {
            f'octavo_{metric}_seconds_bucket{{{I},le="{le}"}}': f"0+{in_time}x{minutes}",
            f"octavo_{metric}_seconds_count{{{I}}}": f"0+1000x{minutes}",
        }

    CASES[f"Octavo{_name}BudgetBurnsFast"] = (_series(800, 120), _series(900, 120))
    CASES[f"Octavo{_name}BudgetBurnsSlowly"] = (_series(920, 420), _series(950, 420))

# The labels of the alert, beside its severity.
LABELS: dict[str, dict[str, str]] = {
    "OctavoDown": {"instance": "a", "job": "octavo"},
    "OctavoAcceleratorIdle": {"instance": "a", "device": "0"},
}


def _minutes(series: Series) -> int:
    """How long the series are."""
    parts = next(iter(series.values())).split()
    return sum(int(part.rpartition("x")[2]) + (index > 0) for index, part in enumerate(parts))


def _test(name: str, series: Series, firing: bool) -> dict[str, Any]:
    rule = ALERTS[name]
    labels = {"severity": rule["labels"]["severity"], **LABELS.get(name, {"instance": "a"})}
    alert = {"exp_labels": labels, "exp_annotations": rule["annotations"]}
    return {
        "interval": "1m",
        "name": f"{name} {'fires' if firing else 'is quiet'}",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{_minutes(series)}m", "alertname": name, "exp_alerts": [alert] if firing else []}
        ],
    }


def test_every_alert_is_seen_firing_and_quiet(tmp_path: Path) -> None:
    promtool = tool("promtool")
    assert set(CASES) == set(ALERTS)
    tests = [
        _test(name, series, firing)
        for name, (bad, good) in CASES.items()
        for series, firing in ((bad, True), (good, False))
    ]
    files = []
    for interval, some in (("1m", [t for t in tests if not _is_long(t)]), ("5m", [t for t in tests if _is_long(t)])):
        files.append(tmp_path / f"alerts_{interval}_test.yml")
        files[-1].write_text(
            yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": interval, "tests": some})
        )
    run = subprocess.run([promtool, "test", "rules", *map(str, files)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def _is_long(test: dict[str, Any]) -> bool:
    """Hours of series: evaluated every five minutes, which still is a third of the shortest wait in such rules."""
    return int(test["alert_rule_test"][0]["eval_time"].removesuffix("m")) > 60


def test_the_configuration_is_valid() -> None:
    promtool = tool("promtool")
    run = subprocess.run(
        [promtool, "check", "config", str(ROOT / "monitoring" / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "rules found" in run.stdout


@pytest.mark.parametrize("name", list(ALERTS))
def test_every_alert_says_what_it_means_and_has_its_section_in_the_runbook(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    anchor = rule["annotations"]["runbook_url"].partition("docs/runbook.md#")[2]
    headings = {heading.lower() for heading in re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)}
    assert anchor in headings
    section = re.split(r"^#{2,3} ", RUNBOOK.partition(f"### {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    assert len(section.split()) > 25, "what it means, what to look at, what to do"
