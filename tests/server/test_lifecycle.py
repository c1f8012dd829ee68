"""Loading, readiness, draining, and what is exported about it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import pytest

from engine.errors import ModelError
from engine.supervisor import EngineState
from engine.types import LoadProgress
from server.app import create_app
from server.settings import Settings
from server.startup import fingerprint
from server.state import ServedModel
from tests.server.toy import INFO, ToyEngine, samples, saying, toy_model, toy_server


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy")


async def test_while_the_model_loads_requests_get_503_and_progress() -> None:
    loads, done, engine = asyncio.Event(), asyncio.Event(), ToyEngine()
    settings = Settings()

    async def load(report: Any) -> ServedModel:
        report(LoadProgress("reading weights", 0.4))
        loads.set()
        await done.wait()
        return toy_model(engine, settings)

    app = create_app(settings, load)
    async with app.router.lifespan_context(app), client_of(app) as http:
        await loads.wait()
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/responses", {"input": "a"})):
            response = await http.post(path, json=body)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert "reading weights, 40%" in response.json()["error"]["message"]
        assert (await http.get("/v1/models")).status_code == 503
        ready = await http.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
        health = (await http.get("/health")).json()
        assert (health["status"], health["ready"], health["running"], health["waiting"]) == ("ok", False, 0, 0)
        assert "octavo_ready 0.0" in (await http.get("/metrics")).text
        done.set()
        while app.state.server.model is None:  # noqa: ASYNC110  # one turn of the loop
            await asyncio.sleep(0)
        assert (await http.get("/ready")).json() == {"status": "ready"}
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    assert engine.closed


async def test_a_model_that_cannot_be_loaded_is_told_to_the_operator() -> None:
    failures: list[Exception] = []
    failed = asyncio.Event()

    def fail(error: Exception) -> None:
        failures.append(error)
        failed.set()

    async def load(report: Any) -> ServedModel:
        raise ModelError("model.gguf: truncated")

    app = create_app(Settings(), load, fail)
    async with app.router.lifespan_context(app), client_of(app) as http:
        await failed.wait()
        assert (await http.get("/ready")).status_code == 503
    assert str(failures[0]) == "model.gguf: truncated"


async def test_draining_refuses_new_work_and_lets_the_running_end() -> None:
    running, hold = asyncio.Event(), asyncio.Event()

    async def gate(step: int) -> None:
        running.set()
        await hold.wait()

    async with toy_server(ToyEngine(saying("Hello"), gate=gate)) as toy:
        answer = asyncio.create_task(toy.post("/v1/completions", prompt="a"))
        await running.wait()
        toy.server.draining = True
        refused = await toy.post("/v1/completions", prompt="a")
        assert (await toy.http.get("/ready")).status_code == 503
        assert (await toy.http.get("/health")).status_code == 200
        hold.set()
        assert (await answer).json()["choices"][0]["text"] == "Hello"
        await toy.server.admission.wait_idle()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1


async def test_what_does_not_end_in_time_is_ended_with_a_503() -> None:
    running = asyncio.Event()
    engine = ToyEngine(saying("x" * 100), gate=lambda step: running.set() if step == 3 else None)
    async with toy_server(engine) as toy:
        answer = asyncio.create_task(toy.post("/v1/completions", prompt="a", max_tokens=200))
        await running.wait()
        toy.server.abort_all("The server is shutting down")
        response = await answer
    assert response.status_code == 503
    assert "shutting down" in response.json()["error"]["message"]


async def test_readiness_follows_the_engine() -> None:
    async with toy_server() as toy:
        toy.engine.state = EngineState.RESTARTING
        ready = await toy.http.get("/ready")
        assert ready.status_code == 503
        assert "the toy is broken" in ready.json()["reason"]
        toy.engine.state = EngineState.READY
        assert (await toy.http.get("/ready")).status_code == 200


async def test_the_metrics_count_what_clients_got() -> None:
    async with toy_server(ToyEngine(saying("Hello|x"), num_cached_tokens=1), max_queued_requests=9) as toy:
        await toy.post("/v1/completions", prompt="ab", n=2)
        await toy.post("/v1/completions", prompt="abc", max_tokens=2, stream=True)
        await toy.post("/v1/completions", prompt="a", stop="|")
        await toy.post("/v1/completions", prompt="")
        await toy.http.get("/nothing")
        found = samples((await toy.http.get("/metrics")).text)
    assert found["octavo_prompt_tokens_total"] == 2 + 3 + 1
    assert found["octavo_cached_prompt_tokens_total"] == 3
    assert found["octavo_generation_tokens_total"] == 8 + 8 + 2 + 6
    assert found["octavo_requests_finished_total{reason=stop}"] == 3
    assert found["octavo_requests_finished_total{reason=length}"] == 1
    assert found["octavo_time_to_first_token_seconds_count"] == 3
    assert found["octavo_inter_token_seconds_count"] == 7 + 7 + 1 + 5
    assert found["octavo_request_duration_seconds_count"] == 3
    assert found["octavo_http_requests_total{code=200,method=POST,route=/v1/completions}"] == 3
    assert found["octavo_http_requests_total{code=400,method=POST,route=/v1/completions}"] == 1
    assert found["octavo_http_requests_total{code=404,method=GET,route=unmatched}"] == 1


async def test_the_metrics_show_the_engines_latest_step() -> None:
    async with toy_server() as toy:
        found = samples((await toy.http.get("/metrics")).text)
    assert found["octavo_requests_running"] == 0
    assert found["octavo_requests_waiting"] == 0
    states = ("free", "private", "shared", "cached")
    blocks = {state: found[f"octavo_kv_blocks{{group=0,state={state}}}"] for state in states}
    assert blocks == {"free": 60, "private": 2, "shared": 1, "cached": 1}
    assert found["octavo_kv_capacity_tokens"] == 1024
    assert found["octavo_prefix_hit_tokens_total"] == 40
    assert found["octavo_engine_steps_total"] == 7
    assert any(name.startswith("octavo_build_info{version=") for name in found)
    assert any(name.startswith("octavo_model_info{") and "kernels=toy" in name for name in found)


async def test_hostile_methods_make_no_new_series() -> None:
    async with toy_server() as toy:
        before = samples((await toy.http.get("/metrics")).text)
        for number in range(200):
            await toy.http.request(f"BREW{number}", "/x")
        after = samples((await toy.http.get("/metrics")).text)
    assert set(after) - set(before) == {
        "octavo_http_requests_total{code=200,method=GET,route=/metrics}",
        "octavo_http_requests_total{code=404,method=other,route=unmatched}",
    }


def test_the_fingerprint_changes_with_what_can_change_an_answer(tmp_path: Any) -> None:
    from dataclasses import replace

    from server.model_store import ModelFiles

    files = ModelFiles("m", tmp_path)
    fields = ("dtype", "kernels", "device", "quantization", "kv_cache_dtype")
    variants = [INFO] + [replace(INFO, **cast(Any, {field: "other"})) for field in fields]
    prints = {fingerprint(files, info) for info in variants} | {fingerprint(ModelFiles("n", tmp_path), INFO)}
    assert len(prints) == len(variants) + 1
    assert fingerprint(files, INFO) == fingerprint(files, INFO)


@pytest.mark.parametrize("path", ["/version", "/", "/openapi.json", "/docs"])
async def test_pages_about_the_server_answer(path: str) -> None:
    async with toy_server() as toy:
        assert (await toy.http.get(path)).status_code == 200


async def test_load_balancers_may_ask_with_head() -> None:
    async with toy_server() as toy:
        for path in ("/health", "/ready"):
            response = await toy.http.head(path)
            assert (response.status_code, response.content) == (200, b"")
