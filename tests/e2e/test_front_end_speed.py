"""The front end keeps up with 64 streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.front_end_speed import measure
from tests.e2e.live import serving


@pytest.mark.slow
def test_twenty_thousand_tokens_a_second_through_sse(default_model_path: Path) -> None:
    """In processor time, which neighbours on this machine do not change; docs/benchmarks.md has the figures of a quiet
    one."""
    with serving("--executor", "fake") as server:
        speed = measure(server, streams=64, tokens=1000)
    assert speed.events >= 0.95 * 64 * 1000  # one chunk a token but for those that complete no text
    assert 64 * 1000 / speed.server_cpu_seconds >= 20_000
