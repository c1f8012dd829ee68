"""The page in a real browser: chat, live view, keyboard, light and dark."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.browser import Page, chromium
from tests.e2e.live import LiveServer, serving

LAST = "document.querySelector('#messages li:last-child').textContent"
SCREENSHOTS = os.environ.get("OCTAVO_SCREENSHOTS")  # a folder to keep pictures in


@pytest.fixture(scope="module")
def server(default_model_path: Path) -> Iterator[LiveServer]:
    flags = ("--executor", "fake", "--fake-step-seconds", "0.02", "--api-key", "ops=SECRET", "--max-num-seqs", "12")
    with serving(*flags) as found:
        yield found


@pytest.fixture(scope="module")
def page(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Opened, with the key given, connected."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    with chromium(program, tmp_path_factory.mktemp("profile")) as found:
        found.size(1280, 1080)
        found.open(f"{server.url}/")
        found.until("document.getElementById('about').textContent.includes('API key')")
        found.problems.clear()  # the 401s are told to the console; from here on it has to be quiet
        found.js("document.getElementById('key').focus()")
        found.type("SECRET")
        found.press("Enter")
        found.js("document.getElementById('prompt').focus()")
        found.until("document.getElementById('state').textContent === 'connected'")
        found.until("document.getElementById('about').textContent.includes('smollm2')")
        yield found
        assert found.problems == []


def keep(page: Page, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(Path(SCREENSHOTS) / f"{name}.png")


def test_a_chat_streams_and_tells_its_speed(page: Page) -> None:
    page.js("document.getElementById('max-tokens').value = 60")
    page.type("Hello, who is there?")
    page.press("Enter")
    page.until(f"{LAST}.length > 5 && !document.getElementById('stop').disabled")
    early = len(page.js(LAST))
    page.until(f"{LAST}.length > {early}")
    page.until("document.getElementById('figures').textContent.includes('first token after')")
    assert "60 tokens" in page.js("document.getElementById('figures').textContent")
    assert page.js("document.activeElement.id") == "prompt"
    assert page.js("document.querySelectorAll('#messages li.error').length") == 0


def test_the_timeline_moves_with_the_batch(page: Page, server: LiveServer) -> None:
    with server.http() as http:  # prompts that begin alike, for the tree to have branches
        for number in range(12):
            prompt = "You answer letters. " * 12 + f"The {number % 3}. kind. " * 8 + f"Letter {number}. " * (4 + number)
            body, headers = {"prompt": prompt, "max_tokens": 1}, {"authorization": "Bearer SECRET"}
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
    page.js("document.getElementById('max-tokens').value = 100; document.getElementById('answers').value = 16")
    before = int(page.js("document.getElementById('timeline').dataset.step"))
    page.type("Count to a hundred.")
    page.press("Enter")
    page.until("Number(document.getElementById('running').textContent) === 12")
    page.until("Number(document.getElementById('waiting').textContent) > 0")
    page.until(f"Number(document.getElementById('timeline').dataset.step) > {before + 40}")
    label = page.js("document.getElementById('timeline').getAttribute('aria-label')")
    assert "12 decodes, 0 prompt chunks" in label
    assert page.js(_COLOURS.format(canvas="timeline")) >= 3  # decodes, prompt chunks, nothing
    assert page.js(_COLOURS.format(canvas="blocks")) >= 3
    page.until("Number(document.getElementById('tree').dataset.branches) >= 4")
    page.until(_COLOURS.format(canvas="tree") + " >= 3")  # in use, cached, between them
    keep(page, "page-light")
    page.scheme("dark")
    page.until(f"Number(document.getElementById('timeline').dataset.step) > {before + 60}")
    keep(page, "page-dark")
    page.scheme("light")
    page.until("document.getElementById('stop').disabled", 30)
    page.until("Number(document.getElementById('running').textContent) === 0")


_COLOURS = """(() => {{
  const canvas = document.getElementById('{canvas}');
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Map();
  for (let i = 0; i < data.length; i += 4) {{
    const name = data[i] + ',' + data[i + 1] + ',' + data[i + 2] + ',' + data[i + 3];
    seen.set(name, (seen.get(name) ?? 0) + 1);
  }}
  return [...seen.values()].filter((count) => count > 20).length;
}})()"""


def test_escape_stops_an_answer_and_the_next_goes_on(page: Page) -> None:
    page.js("document.getElementById('max-tokens').value = 500; document.getElementById('answers').value = 1")
    page.type("Tell me a long story.")
    page.press("Enter")
    page.until(f"{LAST}.length > 3")
    page.press("Escape")
    page.until("document.getElementById('figures').textContent === 'stopped'")
    page.until("Number(document.getElementById('running').textContent) === 0")
    assert not page.js("document.getElementById('send').disabled")


def test_everything_can_be_reached_by_keyboard(page: Page) -> None:
    page.js("document.getElementById('key').focus()")
    reached = []
    for _ in range(9):
        page.press("Tab")
        reached.append(page.js("document.activeElement.id || document.activeElement.tagName"))
    reached = [name for name in reached if name != "messages"]  # can be scrolled, so Chromium stops there
    assert reached[:6] == ["A", "prompt", "temperature", "max-tokens", "answers", "send"]
    page.js("document.getElementById('prompt').focus()")


def test_light_and_dark_follow_the_system(page: Page) -> None:
    colours = []
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        colours.append(page.js("getComputedStyle(document.body).backgroundColor"))
    page.scheme("light")
    assert colours[0] != colours[1]


def test_a_narrow_window_needs_no_sideways_scrolling(page: Page) -> None:
    page.size(390, 800)
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    page.size(1280, 900)


def test_an_error_is_shown_in_words(page: Page) -> None:
    page.js("document.getElementById('temperature').value = 1.9; document.getElementById('max-tokens').value = 1e9")
    page.type("Too much.")
    page.press("Enter")
    page.until("document.querySelectorAll('#messages li.error').length === 1")
    assert page.js(LAST) != ""
    page.problems.clear()  # the browser itself reports the 400
    page.js("document.getElementById('temperature').value = ''; document.getElementById('max-tokens').value = 20")
