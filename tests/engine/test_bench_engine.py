"""scripts/bench_engine.py measures a real engine process with random weights; without a card it says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.hardware import detect

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_engine.py"


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def test_a_tiny_engine_is_measured_from_end_to_end() -> None:
    ended = run("--shape", "tiny", "--device", "cpu", "--kernels", "native", "--requests", "3", "--batch-invariant")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["weight_bytes"] > 0
    assert report["stream_tokens_per_second"] > 0
    assert report["set_tokens_per_second"] > report["set_output_tokens_per_second"] > 0
    assert report["differing_share"] == {"greedy": 0.0, "seeded": 0.0}


@pytest.mark.skipif(detect().has_cuda, reason="there is a card here")
def test_without_a_card_it_says_so() -> None:
    ended = run()
    assert ended.returncode == 1
    assert "no NVIDIA GPU" in ended.stderr


@pytest.mark.slow
def test_tritons_kernels_carry_a_whole_engine_and_neighbours_change_no_token() -> None:
    """In the interpreter: a minute or two for a few dozen tokens."""
    options = ("--shape", "tiny", "--device", "cpu", "--kernels", "triton", "--requests", "4", "--batch-invariant")
    ended = run(*options, TRITON_INTERPRET="1")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    assert "batch-invariant" in report["description"]
    assert report["differing_share"] == {"greedy": 0.0, "seeded": 0.0}


@pytest.mark.gpu
@pytest.mark.skipif(not detect().has_cuda, reason="torch has no GPU here")
def test_on_a_card_64_neighbours_change_no_token() -> None:
    ended = run("--shape", "tiny", "--requests", "64", "--batch-invariant")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["differing_share"] == {"greedy": 0.0, "seeded": 0.0}
