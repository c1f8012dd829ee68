"""The kernels' benchmark runs and ends in JSON."""

from __future__ import annotations

import json
import sys

import pytest

from kernels import bench


def test_the_last_line_is_json_with_a_result_for_each_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_SECONDS_A_REPEAT", 0.0)
    monkeypatch.setattr(bench, "_BYTES_BETWEEN_TURNS", 1 << 20)
    monkeypatch.setattr(
        sys, "argv", ["bench", "--kernels", "torch,no-such", "--threads", "1", "--only", "tokens", "sampling"]
    )
    bench.main()
    lines = capsys.readouterr().out.splitlines()
    assert any("no-such" in line for line in lines)
    [report] = json.loads(lines[-1])
    assert report["kernels"] == "torch"
    assert len(report["cases"]) == 8 + 5
    assert all(case["seconds"] > 0 for case in report["cases"])
    assert report["ceilings"]["read_bytes_per_second"] > 0
