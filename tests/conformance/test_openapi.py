"""schemathesis over /openapi.json: no input makes the server fail or answer other than it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live import ROOT, LiveServer, serving

pytest.importorskip("schemathesis", reason="needs the extra: pip install 'octavo[conformance]'")

CONFIG = Path(__file__).with_name("schemathesis.toml")
GENERATING = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/responses",
    "/generate",
    "/generate/stream",
    "/generate/batch",
)


@pytest.fixture
def server(default_model_path: Path) -> Iterator[LiveServer]:
    """With a short context, so that no case takes long."""
    with serving("--executor", "fake", "--max-model-len", "512") as server:
        yield server


def explore(server: LiveServer, max_examples: int, seed: int, folder: Path, timeout: float) -> Counter[tuple[str, str]]:
    """Run schemathesis, which must find nothing; how many requests each (route, status) got."""
    flags = ["--seed", str(seed), "--max-examples", str(max_examples), "--phases", "coverage,fuzzing", "--no-color"]
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", *flags]
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": "tests.conformance.schemathesis_hooks",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [*command, f"{server.url}/openapi.json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    with server.http() as http:
        text = http.get("/metrics").text
    found = re.findall(r'^octavo_http_requests_total{code="(\d+)",method="[^"]*",route="([^"]*)"} (\S+)$', text, re.M)
    answered: Counter[tuple[str, str]] = Counter()
    for code, route, count in found:
        answered[route, code] += int(float(count))
    return answered


def check(answered: Counter[tuple[str, str]], at_least: int) -> None:
    assert answered.total() >= at_least
    assert {code for _, code in answered if code >= "500"} <= {"503", "504"}
    assert {route for route, code in answered if code == "503"} <= {"/ready"}  # asked while the model was loading
    assert [route for route in GENERATING if answered[route, "200"] < 5] == []  # not all was turned away at the door


def test_nothing_is_found_in_a_short_run(server: LiveServer, tmp_path: Path) -> None:
    check(explore(server, 4, seed=1, folder=tmp_path, timeout=300), at_least=2000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_nothing_is_found_in_a_long_run(server: LiveServer, tmp_path: Path, seed: int) -> None:
    check(explore(server, 100, seed=seed, folder=tmp_path, timeout=1800), at_least=5000)
