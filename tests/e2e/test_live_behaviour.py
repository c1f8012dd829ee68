"""What only a real process on real sockets can show: many streams, clients that leave, signals, malformed HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.live import ROOT, LiveServer, command, serving, until

COMPLETIONS = "/v1/completions"


async def read_stream(http: httpx.AsyncClient, leave_after: int | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed completion; the client may leave early."""
    chunks: list[dict[str, Any]] = []
    async with http.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True} | fields) as response:
        assert response.status_code == 200
        async for data in event_data(response):
            if data == "[DONE]" or len(chunks) == leave_after:
                break
            chunks.append(json.loads(data))
    return chunks


async def event_data(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def many_connections(server: LiveServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None))


def num_tokens(chunks: list[dict[str, Any]]) -> int:
    return sum(len(choice.get("token_ids", [])) for chunk in chunks for choice in chunk["choices"])


def running(server: LiveServer) -> float:
    return server.metric("octavo_requests_running") + server.metric("octavo_requests_waiting")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(len(values) * share) - 1]


@contextlib.contextmanager
def probed(server: LiveServer, probe: str) -> Iterator[list[float]]:
    """What a probe, a process that does nothing else, measures while the block runs; filled at the end."""
    measured: list[float] = []
    command = [sys.executable, "-m", f"tests.e2e.{probe}", "127.0.0.1", str(server.port)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        yield measured
        measured += json.loads(process.communicate()[0])
    assert measured


@pytest.mark.parametrize("num_streams", [64, 128])
async def test_many_streams_of_mixed_lengths_all_complete(slow_server: LiveServer, num_streams: int) -> None:
    lengths = [100 + (number * 37) % 200 for number in range(num_streams)]
    with probed(slow_server, "health_probe") as latencies:
        async with many_connections(slow_server) as http:
            streams = [_mixed_stream(http, number, length) for number, length in enumerate(lengths)]
            answers = await asyncio.gather(*streams)
    assert [num_tokens(chunks) for chunks in answers] == lengths
    assert percentile(latencies, 0.99) < 0.2
    until(lambda: running(slow_server) == 0, 2)


async def _mixed_stream(http: httpx.AsyncClient, number: int, length: int) -> list[dict[str, Any]]:
    prompt = [number, *range(number % 50)]
    return await read_stream(http, prompt=prompt, max_tokens=length, ignore_eos=True, return_token_ids=True)


async def test_dropped_streams_are_aborted_and_their_blocks_come_back(slow_server: LiveServer) -> None:
    async with httpx.AsyncClient(
        base_url=slow_server.url, timeout=60, limits=httpx.Limits(max_connections=None)
    ) as http:
        fields = {"max_tokens": 2000, "ignore_eos": True}
        answers = await asyncio.gather(*[read_stream(http, leave_after=5, **fields) for _ in range(30)])
    assert [len(chunks) for chunks in answers] == [5] * 30
    until(lambda: running(slow_server) == 0, 2)
    generated = slow_server.metric("octavo_generation_tokens_total")
    await asyncio.sleep(0.1)
    assert slow_server.metric("octavo_generation_tokens_total") == generated
    with slow_server.http() as http:
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith("octavo_kv_blocks{")]
    states = {line.split('"')[3]: float(line.split()[-1]) for line in lines}
    assert states["private"] == states["shared"] == 0
    assert (states["free"] + states["cached"]) * 16 == 131072


async def test_a_client_that_leaves_without_a_stream_is_aborted(slow_server: LiveServer) -> None:
    """Report: the engine went on after the client had left."""
    async with httpx.AsyncClient(base_url=slow_server.url, timeout=0.5) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2000, "ignore_eos": True})
    until(lambda: running(slow_server) == 0, 2)


async def test_a_prompt_of_five_megabytes_disturbs_nobody(slow_server: LiveServer) -> None:
    """Report: tokenising on the event loop froze health checks and other streams for seconds."""
    text = "The quick brown fox jumps over the lazy dog. " * (5_000_000 // 45)
    body, headers = json.dumps({"prompt": text}).encode(), {"content-type": "application/json"}
    with probed(slow_server, "health_probe") as latencies, probed(slow_server, "stream_probe") as gaps:
        async with httpx.AsyncClient(base_url=slow_server.url, timeout=120) as http:
            responses = [await http.post(COMPLETIONS, content=body, headers=headers) for _ in range(2)]
    assert [response.status_code for response in responses] == [400, 400]
    assert responses[0].json()["error"]["code"] == "context_length_exceeded"
    assert percentile(latencies, 0.99) < 0.2
    assert max(gaps) < 0.5


# Malformed HTTP


def talk(server: LiveServer, data: bytes, seconds: float = 5) -> bytes:
    """Send bytes, return all that comes back until the other end closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",  # TLS spoken to a plain port
    ],
)
def test_malformed_http_is_answered_in_the_apis_shape(fake_server: LiveServer, data: bytes) -> None:
    answer = talk(fake_server, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    with fake_server.http() as http:
        assert http.get("/health").status_code == 200


def test_headers_without_end_are_refused(fake_server: LiveServer) -> None:
    answer = talk(fake_server, b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 400_000)
    assert answer.startswith(b"HTTP/1.1 431")


def test_headers_that_do_not_arrive_in_time_are_refused(default_model_path: Path) -> None:
    with serving("--executor", "fake", "--head-timeout-seconds", "0.3") as server:
        assert talk(server, b"GET /health HTTP/1.1\r\nhost:").startswith(b"HTTP/1.1 408")
        assert talk(server, b"") == b""


def test_a_client_that_does_not_read_is_cut_off(default_model_path: Path) -> None:
    """The engine may have computed all of it long before the server gives the client up: the gauges of the engine fall
    to 0 then, and the choices are counted later, when the server is done with them."""
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 8000, "ignore_eos": True, "n": 16, "logprobs": 5})
    request = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request += f"content-length: {len(body)}\r\n\r\n{body}"
    with serving("--executor", "fake", "--slow-reader-seconds", "0.5") as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request.encode())
        until(lambda: server.metric("octavo_requests_finished_total") == 16, 30)
        assert server.metric('octavo_aborts_total{cause="disconnect"}') > 0
        until(lambda: running(server) == 0, 2)


# Starting and stopping


async def test_sigterm_lets_streams_end_and_refuses_new_ones(default_model_path: Path) -> None:
    """Report: SIGTERM cut streams."""
    with serving("--executor", "fake", "--fake-step-seconds", "0.01") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            fields = {"max_tokens": 100, "ignore_eos": True, "return_token_ids": True}
            streams = [asyncio.create_task(read_stream(http, **fields)) for _ in range(5)]
            while running(server) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            server.signal(signal.SIGTERM)
            await asyncio.sleep(0.05)
            ready = await http.get("/ready")
            refused = await http.post(COMPLETIONS, json={"prompt": "a"})
            answers = await asyncio.gather(*streams)
        assert server.wait() == 0
    assert ready.status_code == 503
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert [num_tokens(chunks) for chunks in answers] == [100] * 5


async def test_streams_that_last_longer_than_the_drain_time_end_with_an_error(default_model_path: Path) -> None:
    flags = ("--executor", "fake", "--fake-step-seconds", "0.01", "--drain-timeout-seconds", "0.3")
    with serving(*flags) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            stream = asyncio.create_task(read_stream(http, max_tokens=5000, ignore_eos=True))
            while running(server) < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            server.signal(signal.SIGINT)
            chunks = await stream
        assert server.wait() == 0
    assert "shutting down" in chunks[-1]["error"]["message"]


def test_a_second_signal_ends_the_server_at_once(default_model_path: Path) -> None:
    flags = ("--executor", "fake", "--fake-step-seconds", "0.05", "--drain-timeout-seconds", "60")
    body = {"prompt": "a", "stream": True, "max_tokens": 5000, "ignore_eos": True}
    with serving(*flags) as server, server.http() as http, http.stream("POST", COMPLETIONS, json=body):
        server.signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.process.poll() is None
        start = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait(5) == 128 + signal.SIGTERM
        assert time.monotonic() - start < 1


def test_a_port_in_use_is_said_at_once(fake_server: LiveServer) -> None:
    done = subprocess.run(command("serve", "--port", str(fake_server.port)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{fake_server.port}" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 200, b"not a model"])
def test_a_broken_model_file_is_named_with_the_reason(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    flags = command("serve", "--port", "0", "--model", str(file))
    done = subprocess.run(flags, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "broken.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_is_said(tmp_path: Path) -> None:
    flags = command("serve", "--port", "0", "--model", str(tmp_path / "none"))
    done = subprocess.run(flags, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "there is no file or folder" in done.stderr


def test_the_metrics_port_needs_no_key(default_model_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving("--executor", "fake", "--api-key", "k", "--metrics-port", str(port)) as server, server.http() as http:
        assert http.get("/metrics").status_code == 401
        assert "octavo_ready 1.0" in httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 404


def test_an_engine_that_dies_or_hangs_never_hangs_its_clients(default_model_path: Path) -> None:
    """Report: health was fine while the engine was dead or stuck."""
    with serving("--executor", "fake", "--fake-step-seconds", "0.01") as server, server.http(30) as http:
        import psutil

        (engine,) = psutil.Process(server.process.pid).children()
        fields = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with http.stream("POST", COMPLETIONS, json=fields) as response:
            lines = response.iter_lines()
            next(lines)
            engine.kill()
            until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, 5, 0.002)
            rest = list(lines)
        assert any("[DONE]" in line or '"error"' in line for line in rest)
        assert httpx.get(f"{server.url}/health").status_code == 200
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 30)
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


def test_https_with_a_certificate_by_flag(default_model_path: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    flags = ("--executor", "fake", "--tls-certificate", str(certificate), "--tls-key", str(key))
    with serving(*flags, trust=str(certificate)) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=server.url, verify=context) as http:
            answer = http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 3})
            assert answer.json()["usage"]["completion_tokens"] == 3


def test_in_json_both_processes_write_objects(default_model_path: Path) -> None:
    with serving("--executor", "fake", ready=False, OCTAVO_LOG_FORMAT="json") as server:
        until(lambda: "curl" in server.log, 60)
        import psutil

        (engine,) = psutil.Process(server.process.pid).children()
        assert engine.cmdline()[-2:] == ["--log-format", "json"]
    assert all(json.loads(line)["event"] for line in server.lines)
