"""A profile of the real model, taken over HTTP: slices that lie within one another, as Perfetto wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernels.timing import OPERATIONS
from tests.e2e.live import serving


def test_a_profile_of_the_default_model(default_model_path: Path) -> None:
    with serving("--api-key", "ops=SECRET", "--max-model-len", "512") as server, server.http() as http:
        http.headers["authorization"] = "Bearer SECRET"
        body = {"prompt": "Paper was invented", "max_tokens": 12, "ignore_eos": True}
        http.post("/v1/completions", json=body)  # the native kernels record the shapes
        assert http.post("/debug/profile/start", params={"steps": 50}).json() == {"steps": 50}
        assert http.post("/debug/profile/start").status_code == 409
        http.post("/v1/completions", json=body)
        trace = http.post("/debug/profile/stop").json()
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sum(event["name"] == "forward" for event in slices) == 12
    names = {event["name"] for event in slices}
    assert names >= {"schedule", "execute", "forward", "sample", "update", "publish", "linear", "paged_attention"}
    assert names - set(OPERATIONS) == {"schedule", "execute", "forward", "sample", "update", "publish"}
    for track in (1, 2):
        _check_nesting([event for event in slices if event["tid"] == track])


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    """Of two slices of a track one ends before the other begins, or lies within it."""
    rounding = 0.2  # µs
    open_until: list[float] = []
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        while open_until and open_until[-1] <= event["ts"] + rounding:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1] + rounding, event
        open_until.append(end)
