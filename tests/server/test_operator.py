"""What an operator may ask and tell a running server."""

from __future__ import annotations

import asyncio
from typing import Any

from server.app import create_app
from server.settings import Settings
from server.startup import supervisor_options
from tests.server.test_lifecycle import client_of
from tests.server.toy import ToyEngine, toy_server


async def test_the_engines_record_is_for_key_holders() -> None:
    engine = ToyEngine()
    async with toy_server(engine, api_key=("ops=SECRET",)) as toy:
        assert (await toy.http.get("/debug/engine")).status_code == 401
        headers = {"authorization": "Bearer SECRET"}
        engine.open[7] = {0}
        assert (await toy.http.get("/debug/engine", headers=headers)).json() == {
            "steps": [],
            "open_requests": [{"request_id": 7}],
        }
        engine.open.clear()


async def test_the_record_can_be_read_while_the_server_drains() -> None:
    async with toy_server() as toy:
        toy.server.draining = True
        assert (await toy.http.get("/debug/engine")).status_code == 200


async def test_there_is_no_record_before_there_is_an_engine() -> None:
    async def load(report: Any) -> Any:
        await asyncio.Event().wait()

    app = create_app(Settings(), load)
    async with app.router.lifespan_context(app), client_of(app) as http:
        response = await http.get("/debug/engine")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "service_unavailable")


async def test_the_prefix_cache_can_be_reset() -> None:
    engine = ToyEngine(num_cached_tokens=5)
    async with toy_server(engine, api_key=("ops=SECRET",)) as toy:
        assert (await toy.http.post("/reset_prefix_cache")).status_code == 401
        response = await toy.http.post("/reset_prefix_cache", headers={"authorization": "Bearer SECRET"})
    assert (response.json(), engine.num_cached_tokens) == ({"reset": True}, 0)


async def test_profiles_are_for_key_holders_and_bounded() -> None:
    engine = ToyEngine()
    async with toy_server(engine, api_key=("ops=SECRET",)) as toy:
        headers = {"authorization": "Bearer SECRET"}
        statuses = [
            (await toy.http.post(path, headers=headers if known else {})).status_code
            for path, known in (
                ("/debug/profile/start", False),
                ("/debug/profile/stop", False),
                ("/debug/profile/start?steps=0", True),
                ("/debug/profile/start?steps=100000", True),
                ("/debug/profile/start?steps=7", True),
            )
        ]
        stopped = await toy.http.post("/debug/profile/stop", headers=headers)
    assert statuses == [401, 401, 400, 400, 200]
    assert engine.profiled_steps == 7
    assert (stopped.json(), "attachment" in stopped.headers["content-disposition"]) == ({}, True)


def test_the_limits_of_the_watchdog_are_the_operators() -> None:
    options = supervisor_options(Settings(step_timeout_seconds=7, first_step_timeout_seconds=9, flight_record_steps=3))
    limits = options.limits
    assert (limits.step_seconds, limits.first_step_seconds, limits.pong_seconds) == (7, 9, 7)
    assert options.flight_steps == 3
    assert options.flight_folder == Settings().cache_dir / "flight-records"
