"""The door: errors in one shape, keys, bodies, ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.errors import EngineDead
from engine.supervisor import EngineState
from engine.types import ErrorKind
from server.access import ANONYMOUS, OPEN_PATHS, KeyRing
from server.errors import ERROR_TABLE, to_wire
from server.settings import Settings, SettingsProblem, load_settings
from tests.server.toy import ToyEngine, ToyServer, saying, toy_server

COMPLETIONS = "/v1/completions"


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, which has exactly the four keys of the API."""
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] in ("invalid_request_error", "rate_limit_error", "server_error")
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("body", "media_type", "status"),
    [
        (b'{"prompt": ', "application/json", 400),
        (b'{"prompt": "a"} x', "application/json", 400),
        (b'{"prompt": NaN}', "application/json", 400),
        (b'{"prompt": "\xff"}', "application/json", 400),
        (b'{"prompt": "\\ud800"}', "application/json", 400),
        (b"[" * 5000, "application/json", 400),
        (b"5", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"null", "application/json", 400),
        (b"", "application/json", 400),
        (b'{"prompt": "a"}', "text/plain", 415),
        (b'{"prompt": "a"}', "application/x-www-form-urlencoded", 415),
    ],
)
async def test_a_broken_body_is_answered_in_the_apis_shape(body: bytes, media_type: str, status: int) -> None:
    async with toy_server() as toy:
        response = await toy.http.post(COMPLETIONS, content=body, headers={"content-type": media_type})
    check_error(response, status)
    assert response.headers["x-should-retry"] == "false"


async def test_unknown_paths_say_what_is_there() -> None:
    async with toy_server() as toy:
        without_v1 = await toy.http.post("/chat/completions", json={})
        misspelt = await toy.http.get("/v1/model")
        far = await toy.http.get("/zzz")
    assert "/v1/chat/completions" in check_error(without_v1, 404)["message"]
    assert "base URL" in without_v1.json()["error"]["message"]
    assert "/v1/models" in check_error(misspelt, 404)["message"]
    assert "/docs" in check_error(far, 404)["message"]


async def test_a_wrong_method_is_405_with_the_right_ones() -> None:
    async with toy_server() as toy:
        response = await toy.http.get(COMPLETIONS)
    assert check_error(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


async def test_an_unknown_model_is_404_and_lists_the_known() -> None:
    async with toy_server() as toy:
        error = check_error(await toy.post(COMPLETIONS, prompt="a", model="gpt-9"), 404)
        assert (await toy.post(COMPLETIONS, prompt="a", model="alias")).json()["model"] == "alias"
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "toy, alias" in error["message"]


async def test_an_unexpected_error_is_a_500_that_says_little_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any, choice: int) -> Any:
        raise RuntimeError("secret detail")

    async with toy_server(ToyEngine(broken)) as toy:
        response = await toy.post(COMPLETIONS, prompt="a")
        assert "secret" not in check_error(response, 500)["message"]
        assert (await toy.http.get("/health")).status_code == 200
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (ErrorKind.REJECTED, 400, None),
        (ErrorKind.INTERNAL, 500, "engine_error"),
        (ErrorKind.UNAVAILABLE, 503, "engine_unavailable"),
    ],
)
async def test_an_error_of_the_engine_is_answered_by_whose_fault_it_is(
    kind: ErrorKind, status: int, code: str | None
) -> None:
    for step in (0, 2):
        async with toy_server(ToyEngine(saying("abcdef"), fail_at=(step, kind))) as toy:
            whole = await toy.post(COMPLETIONS, prompt="a")
            streamed = await toy.post(COMPLETIONS, prompt="a", stream=True)
        assert check_error(whole, status)["code"] == code
        if step == 0:
            check_error(streamed, status)
        else:  # the stream had begun
            assert streamed.status_code == 200
            last = json.loads(streamed.text.split("\n\n")[-2].removeprefix("data: "))
            assert last["error"]["message"] == "the toy fails"
            assert "[DONE]" not in streamed.text


async def test_an_engine_that_is_down_is_503_with_a_time_to_come_back() -> None:
    async with toy_server(ToyEngine(state=EngineState.BROKEN)) as toy:
        response = await toy.post(COMPLETIONS, prompt="a")
        ready = await toy.http.get("/ready")
    assert check_error(response, 503)["code"] == "engine_unavailable"
    assert int(response.headers["retry-after"]) >= 1
    assert ready.status_code == 503


async def test_request_ids_are_echoed_or_made() -> None:
    async with toy_server() as toy:
        echoed = await toy.http.get("/health", headers={"x-request-id": "abc-1"})
        made = await toy.http.get("/health", headers={"x-request-id": "a b"})
    assert echoed.headers["x-request-id"] == "abc-1"
    assert made.headers["x-request-id"].startswith("req_")


async def test_a_body_over_the_limit_is_413() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 100

    async with toy_server(max_body_bytes=2048) as toy:
        declared = await toy.post(COMPLETIONS, prompt="x" * 3000)
        chunked = await toy.http.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
        fits = await toy.post(COMPLETIONS, prompt="x" * 100)
    for response in (declared, chunked):
        assert check_error(response, 413)["code"] == "request_too_large"
        assert response.headers["connection"] == "close"
    assert fits.status_code == 200


# Keys


def bearer(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"authorization": f"{scheme} {key}"}


def all_paths(toy: ToyServer) -> list[tuple[str, str]]:
    schema = toy.app.openapi()["paths"]
    documented = [(method.upper(), path) for path, methods in schema.items() for method in methods]
    return [*documented, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/redoc"), ("GET", "/nothing-here")]


async def test_every_path_but_the_open_ones_needs_a_key_whatever_its_spelling() -> None:
    """Report: side routes answered without a key where the guard matched prefixes."""
    async with toy_server(api_key=("SECRET",)) as toy:
        checked = 0
        for method, path in all_paths(toy):
            path = path.replace("{name}", "toy").replace("{name:path}", "toy")
            if path in OPEN_PATHS:
                assert (await toy.http.request(method, path)).status_code == 200
                continue
            doubled = f"http://toy/{path}"  # whole, lest // begins a host
            for spelling in (path, doubled, f"{path}/", path.upper(), f"/health/..{path}", f"/health{path}"):
                for headers in (
                    {},
                    bearer("WRONG"),
                    bearer("secret"),
                    bearer("SECRET "[:3]),
                    bearer("SECRET", "Basic"),
                ):
                    response = await toy.http.request(method, spelling, headers=headers)
                    assert response.status_code == 401, (method, spelling, headers)
                    assert response.json()["error"]["code"] in ("invalid_api_key",)
                    checked += 1
        assert checked > 300
        assert (await toy.http.get("/v1/models", headers=bearer("SECRET"))).status_code == 200
        assert (await toy.http.get("/v1/models", headers=bearer("SECRET", "BEARER"))).status_code == 200
        assert (await toy.http.get("/v1/models", headers={"x-api-key": "SECRET"})).status_code == 200


async def test_a_missing_key_says_how_to_send_one() -> None:
    async with toy_server(api_key=("k",)) as toy:
        response = await toy.http.get("/v1/models")
    assert "Authorization: Bearer" in check_error(response, 401)["message"]
    assert response.headers["www-authenticate"] == "Bearer"


def test_keys_come_from_flags_and_a_file_with_their_names(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# operators\nops = s3cret \n\nYWJjZA==\n")
    ring = KeyRing.from_settings(load_settings({"api_key": ("plain", "app=x=y"), "api_key_file": file}).settings)
    assert [name for name, _ in ring.digests] == ["key-1", "app", "ops", "key-4"]
    for key, name in (("plain", "key-1"), ("x=y", "app"), ("s3cret", "ops"), ("YWJjZA==", "key-4")):
        assert ring.identify([(b"authorization", f"Bearer {key}".encode())]) == name
    assert KeyRing().identify([]) == ANONYMOUS


def test_keys_that_cannot_be_told_apart_are_a_problem(tmp_path: Any) -> None:
    with pytest.raises(SettingsProblem, match="same name"):
        KeyRing.from_settings(load_settings({"api_key": ("a=1", "a=2")}).settings)
    with pytest.raises(SettingsProblem, match="--api-key-file"):
        KeyRing.from_settings(Settings(api_key_file=tmp_path / "none"))


# Cross-origin


async def test_pages_of_an_allowed_origin_may_call_the_api() -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with toy_server(cors_origin=("https://a.example",), api_key=("k",)) as toy:
        allowed = await toy.http.options(COMPLETIONS, headers={"origin": "https://a.example"} | preflight)
        other = await toy.http.options(COMPLETIONS, headers={"origin": "https://b.example"} | preflight)
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in other.headers


async def test_below_a_root_path_both_kinds_of_proxy_work() -> None:
    async with toy_server(root_path="/llm", api_key=("k",)) as toy:
        for path in ("/health", "/llm/health", "/ready", "/llm/ready"):
            assert (await toy.http.get(path)).status_code == 200
        for path in ("/v1/models", "/llm/v1/models"):
            assert (await toy.http.get(path)).status_code == 401
            assert (await toy.http.get(path, headers=bearer("k"))).status_code == 200


# The table


def test_every_row_of_the_table_makes_a_whole_error() -> None:
    for cls, row in ERROR_TABLE.items():
        wire = to_wire(cls("what happened"))
        assert wire.status == row.status
        assert json.loads(wire.json())["error"]["type"] == row.type
        assert ("retry-after" in wire.headers) == (row.status in (429, 503))
        assert (wire.headers.get("x-should-retry") == "false") == (not row.retry)
    assert to_wire(EngineDead("x")).status == 503  # by its base class


async def test_a_client_that_leaves_early_aborts_an_answer_that_is_not_streamed() -> None:
    running, gone = asyncio.Event(), asyncio.Event()
    engine = ToyEngine(saying("x" * 100), gate=lambda step: running.set() if step == 3 else None)
    async with toy_server(engine) as toy:
        body = json.dumps({"prompt": "a", "max_tokens": 200, "ignore_eos": True}).encode()
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            if not sent:
                sent.append("body")
                return {"type": "http.request", "body": body, "more_body": False}
            await running.wait()
            gone.set()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "raw_path": COMPLETIONS.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("toy", 80),
        }
        await toy.app(scope, receive, send)
        assert gone.is_set()
        assert sent == ["body"]
        assert engine.dropped == [engine.requests[0].request_id]
        assert toy.server.admission.num_active == 0
