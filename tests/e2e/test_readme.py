"""The README's commands, run as they are written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BASE_URL = "http://127.0.0.1:8000"
START_LIMIT_SECONDS = 180  # a first start on a new machine installs and fetches the model


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def block_with(language: str, words: str) -> str:
    (found,) = [block for block in blocks(language) if words in block]
    return found


def ready() -> bool:
    try:
        return httpx.get(f"{BASE_URL}/ready", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def served() -> Iterator[subprocess.Popen[bytes]]:
    """`make serve`, as the README has it."""
    assert "make serve" in block_with("sh", "make test")
    assert not ready(), "another server holds port 8000: end it first"
    process = subprocess.Popen(
        ["make", "serve"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_")},
        start_new_session=True,
    )
    try:
        give_up = time.monotonic() + START_LIMIT_SECONDS
        while not ready():
            assert process.poll() is None, "`make serve` ended"
            assert time.monotonic() < give_up, "`make serve` was not ready in time"
            time.sleep(0.2)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_the_curl_line_gets_an_answer(served: subprocess.Popen[bytes]) -> None:
    done = subprocess.run(
        ["bash", "-c", block_with("sh", "curl")], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert '"object":"chat.completion"' in done.stdout
    assert '"role":"assistant"' in done.stdout


def test_the_sdk_snippet_streams_an_answer(served: subprocess.Popen[bytes]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block_with("python", "from openai import OpenAI")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert len(done.stdout.strip()) > 0


def test_generate_answers_in_the_terminal() -> None:
    command = block_with("sh", "octavo generate").strip()
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert len(done.stdout.strip()) > 0


def test_ctrl_c_ends_the_server_with_success(served: subprocess.Popen[bytes]) -> None:
    """What a terminal does on Ctrl-C: SIGINT to the whole foreground group, make included."""
    children = subprocess.run(
        ["ps", "-o", "pid=,args=", "-g", str(served.pid)], capture_output=True, text=True, check=True
    ).stdout
    (server,) = [int(line.split()[0]) for line in children.splitlines() if "bin/octavo serve" in line]
    os.kill(server, signal.SIGINT)
    assert served.wait(timeout=30) == 0


def test_every_relative_link_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", README)) <= targets
