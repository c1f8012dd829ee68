"""The page and what it hears of the engine; the browser has its own test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.config import FakeOptions
from server.live import StepFeed, live_events
from tests.server.fake_engine import fake_served
from tests.server.toy import toy_server

FOLDER = Path(__file__).resolve().parents[2] / "server" / "ui"
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def test_browsers_get_the_page_and_others_json() -> None:
    async with toy_server() as toy:
        page = await toy.http.get("/", headers=HTML)
        other = await toy.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "<h1>Octavo</h1>" in page.text
    assert other.json()["models"] == ["toy", "alias"]
    assert page.headers["vary"] == other.headers["vary"] == "accept"


async def test_the_page_loads_only_what_the_server_has() -> None:
    html = (FOLDER / "index.html").read_text()
    names = re.findall(r'(?:src|href)="(ui/[^"]+)"', html)
    names += [f"ui/{name}" for name in re.findall(r'from "\./([^"]+)"', (FOLDER / "app.js").read_text())]
    assert sorted(names) == ["ui/app.js", "ui/live.js", "ui/style.css"]
    async with toy_server() as toy:
        for name in names:
            answer = await toy.http.get(f"/{name}")
            assert answer.status_code == 200
            assert answer.headers["content-type"].split(";")[0] in ("text/javascript", "text/css")
    for file in FOLDER.iterdir():
        assert not re.search(r"https?://", file.read_text()), "works offline"


async def test_without_the_page_nothing_of_it_is_there() -> None:
    async with toy_server(ui=False) as toy:
        assert (await toy.http.get("/", headers=HTML)).json()["name"] == "octavo"
        for path in ("/ui/app.js", "/ui/style.css", "/ui/live.js", "/ui/live"):
            answer = await toy.http.get(path)
            assert (answer.status_code, "--no-ui" in answer.text) == (404, True)


async def test_with_keys_the_page_is_open_but_neither_names_nor_the_live_view_are() -> None:
    async with toy_server(api_key=("k",)) as toy:
        assert (await toy.http.get("/", headers=HTML)).status_code == 200
        assert (await toy.http.get("/ui/app.js")).status_code == 200
        assert (await toy.http.get("/")).json()["models"] == []
        assert (await toy.http.get("/ui/live")).status_code == 401


async def test_the_live_view_tells_the_largest_branches_of_the_prefix_cache() -> None:
    async with toy_server() as toy:
        events = live_events(toy.server)
        first, second, third = [_event(await anext(events)) for _ in range(3)]
        await events.aclose()
    assert second["tree"] == [[-1, 0, 16, 48, 1], [0, 16, 32, 32, 1]]
    assert "tree" not in first | third


async def test_the_live_view_tells_who_is_in_each_step() -> None:
    options = FakeOptions(vocab_size=259, rule="script", script=tuple(b"abc"), step_seconds=0.005)
    async with fake_served(options) as served:
        events = live_events(served.server)
        first = _event(await anext(events))
        assert first["steps"] == []
        await served.post("/v1/completions", prompt="x" * 40, max_tokens=3, n=2)
        news = _event(await anext(events))
        await events.aclose()
        assert served.engine._listeners[1:] == []  # the metrics' own is left
    steps = news["steps"]
    assert [step["decodes"] for step in steps[-2:]] == [2, 2]
    assert all(tokens == 1 for _, _, tokens in steps[-1]["seqs"])
    assert sum(tokens for step in steps for _, _, tokens in step["seqs"]) == 39 + 2 + 2 * 2
    assert news["tokens_per_second"] > 0
    assert set(news["kv"][0]) == {"free", "private", "shared", "cached"}


def test_a_feed_that_is_not_read_stays_small() -> None:
    from engine.core.plan import SeqId
    from engine.wire import StepBegun
    from tests.monitoring.test_metrics import STEP

    feed = StepFeed()
    for number in range(1000):
        feed.note(STEP, StepBegun(number, tuple(SeqId(k, 0) for k in range(500)), (1,) * 500))
    news = feed.take(STEP)
    assert len(news["steps"]) == 100
    assert len(news["steps"][0]["seqs"]) == 64
    assert feed.take(None) == {**feed.take(None), "steps_per_second": 0.0}


@pytest.mark.parametrize("path", ["/", "/ui/live"])
async def test_the_page_is_in_the_description(path: str) -> None:
    async with toy_server() as toy:
        assert path in toy.app.openapi()["paths"]


def _event(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data.decode().removeprefix("data: "))
    return found
