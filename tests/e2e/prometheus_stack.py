"""A real Prometheus with the shipped rules, watching a live server; and load for it to see."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.live import ROOT, LiveServer, free_port, until


@dataclass(frozen=True)
class Prometheus:
    """Its HTTP API."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        response = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        assert response.status_code == 200, response.text
        return response.json()["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The vector that an expression has now."""
        result: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return result


@contextlib.contextmanager
def prometheus(program: str, server: LiveServer, folder: Path, interval: str = "1s") -> Iterator[Prometheus]:
    """The shipped configuration with this server as its target, scraped and evaluated at the interval."""
    config = yaml.safe_load((ROOT / "monitoring" / "prometheus.yml").read_text())
    rules = yaml.safe_load((ROOT / "monitoring" / "alerts.yml").read_text())
    config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    for group in rules["groups"]:
        group.pop("interval", None)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    port = free_port()
    process = subprocess.Popen(
        [
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
            "--enable-feature=exemplar-storage",
        ],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _answers(f"{url}/-/ready"), 30, 0.1)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(15)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def load(server: LiveServer, users: int = 3) -> Iterator[None]:
    """Users with requests of all kinds, until the block ends: answered, streamed, cut, refused."""
    stop = threading.Event()
    threads = [threading.Thread(target=_use, args=(server, stop, number)) for number in range(users)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


def _use(server: LiveServer, stop: threading.Event, user: int) -> None:
    with server.http() as http:
        turn = 0
        while not stop.is_set():
            prompt = f"You are a patient clerk. {'Files and folders. ' * (turn % 9)} User {user} asks {turn}."
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20 + turn % 30})
            with http.stream("POST", "/v1/completions", json={"prompt": prompt, "max_tokens": 60, "stream": True}) as s:
                lines = s.iter_lines()
                next(lines)
                if turn % 5:  # else the client goes
                    for _ in lines:
                        pass
            if turn % 3 == 0:
                http.post("/v1/completions", json={"prompt": prompt, "temperature": -1})
            turn += 1
            time.sleep(0.02)
