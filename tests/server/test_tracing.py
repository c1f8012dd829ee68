"""One request, one trace: what an OTLP receiver gets to see of it."""

from __future__ import annotations

import builtins
import itertools
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from engine.config import FakeOptions
from server.settings import Settings, SettingsProblem
from server.tracing import PromptCourse, Stretch, Tracing
from tests.server.fake_engine import fake_served
from tests.server.otlp_receiver import Receiver, attributes, receiving
from tests.server.toy import toy_server

ROOT = Path(__file__).resolve().parents[2]
STEP_SECONDS = 0.01
SLOW = FakeOptions(vocab_size=259, rule="script", script=tuple(b"abcdefgh"), step_seconds=STEP_SECONDS)
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def traced(headers: dict[str, str] | None = None, **body: Any) -> tuple[Receiver, str, tuple[float, float]]:
    """The spans of one completion, the metrics in OpenMetrics, and when it was asked for and answered."""
    with receiving() as receiver:
        async with fake_served(SLOW, engine={"max_num_batched_tokens": 16}, otlp_endpoint=receiver.url) as served:
            before = time.time()
            response = await served.http.post("/v1/completions", json=body, headers=headers or {})
            after = time.time()
            assert response.status_code == 200
            accept = {"accept": "application/openmetrics-text; version=1.0.0"}
            exposition = (await served.http.get("/metrics", headers=accept)).text
        return receiver, exposition, (before, after)


def seconds(span: Span) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


async def test_a_request_is_one_tree_with_right_timings_under_its_caller() -> None:
    receiver, _, (before, after) = await traced(
        {"traceparent": CALLER, "tracestate": "vendor=1"}, prompt="x" * 40, max_tokens=9, stream=True
    )
    root = receiver.one("POST /v1/completions")
    assert root.kind == Span.SPAN_KIND_SERVER
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (
        CALLER[3:35],
        CALLER[36:52],
        "vendor=1",
    )
    assert {span.trace_id for span in receiver.spans} == {root.trace_id}
    stages = ["receive", "validate", "tokenise", "queue", "prefill", "decode", "detokenise", "send"]
    for span in map(receiver.one, stages):
        assert span.parent_span_id == root.span_id
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    ends = [receiver.one(name) for name in stages[:6]]
    for earlier, later in itertools.pairwise(ends):
        assert earlier.end_time_unix_nano <= later.start_time_unix_nano
    assert before - 0.05 <= root.start_time_unix_nano / 1e9 <= root.end_time_unix_nano / 1e9 <= after + 0.05

    prefill, chunks = receiver.one("prefill"), receiver.named("prefill chunk")
    assert [attributes(chunk)["octavo.tokens"] for chunk in chunks] == [16, 16, 8]
    assert {chunk.parent_span_id for chunk in chunks} == {prefill.span_id}
    assert all(seconds(chunk) >= STEP_SECONDS for chunk in chunks)
    assert seconds(prefill) >= 3 * STEP_SECONDS
    assert seconds(receiver.one("decode")) >= 5 * STEP_SECONDS  # of 8 gaps: the first token may be read late
    assert len(receiver.spans) == 1 + len(stages) + 3


async def test_decoding_is_one_span_with_events() -> None:
    receiver, _, _ = await traced(prompt="x", max_tokens=9, n=1)
    decode = receiver.one("decode")
    assert [event.name for event in decode.events] == ["1 tokens", "2 tokens", "4 tokens", "8 tokens"]
    times = [event.time_unix_nano for event in decode.events]
    assert times == sorted(times)
    assert attributes(decode)["octavo.tokens"] == 9


async def test_attributes_follow_the_conventions_for_generative_ai_and_hold_no_text() -> None:
    receiver, _, _ = await traced(prompt="a secret", max_tokens=3, temperature=0.5, top_p=0.9, n=2)
    found = attributes(receiver.one("POST /v1/completions"))
    assert (
        found.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": "toy",
            "gen_ai.response.model": "toy",
            "gen_ai.request.max_tokens": 3,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": pytest.approx(0.9),
            "gen_ai.request.choice.count": 2,
            "gen_ai.usage.input_tokens": 8,
            "gen_ai.usage.output_tokens": 6,
            "http.request.method": "POST",
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
        }.items()
    )
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert found["gen_ai.response.id"].startswith("cmpl-")
    assert receiver.resource["service.name"] == "octavo"
    assert not any("secret" in str(attributes(span)) for span in receiver.spans)


async def test_exemplars_lead_from_histograms_to_the_trace() -> None:
    receiver, exposition, _ = await traced(prompt="x" * 20, max_tokens=4)
    trace_id = receiver.one("POST /v1/completions").trace_id.hex()
    for name in ("time_to_first_token", "request_duration", "inter_token", "request_queue", "http_request_duration"):
        pattern = rf'^octavo_{name}_seconds_bucket{{.*}} \S+ # {{(?=.*trace_id="{trace_id}").*}}'
        assert re.search(pattern, exposition, re.MULTILINE), name
    assert exposition.endswith("# EOF\n")


async def test_a_caller_that_does_not_sample_is_not_traced() -> None:
    receiver, exposition, _ = await traced({"traceparent": CALLER[:-1] + "0"}, prompt="x", max_tokens=2)
    assert receiver.spans == []
    assert "trace_id" not in exposition


async def test_the_parts_of_a_batch_share_a_trace() -> None:
    with receiving() as receiver:
        async with fake_served(SLOW, otlp_endpoint=receiver.url) as served:
            requests = [{"prompt": "x" * length, "max_tokens": 3} for length in (5, 6)]
            answers = (await served.post("/generate/batch", requests=requests)).json()["responses"]
    assert len(answers) == 2
    root = receiver.one("POST /generate/batch")
    usage = [attributes(root)[f"gen_ai.usage.{way}_tokens"] for way in ("input", "output")]
    assert usage == [11, 6]
    decodes = receiver.named("decode")
    assert {span.parent_span_id for span in decodes} == {root.span_id}
    assert sorted(attributes(span)["octavo.prompt"] for span in decodes) == [0, 1]


async def test_a_refusal_is_a_trace_of_its_own_and_a_probe_is_none() -> None:
    with receiving() as receiver:
        async with toy_server(otlp_endpoint=receiver.url) as toy:
            await toy.http.get("/health")
            await toy.post("/v1/completions", prompt="x", temperature=-1)
            toy.server.draining = True
            await toy.post("/v1/completions", prompt="x")
    codes = [attributes(span)["http.response.status_code"] for span in receiver.named("POST /v1/completions")]
    assert codes == [400, 503]
    statuses = [span.status.code for span in receiver.named("POST /v1/completions")]
    assert statuses == [Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR]


def test_the_engine_that_takes_a_prompt_back_shows_in_the_decode_events() -> None:
    course = PromptCourse(10, 0.0)
    course.tokens(3, 1.0)
    course.chunks += [(0.0, 0.1, 4), (0.2, 0.3, 2), (0.4, 0.5, 1)]
    course.num_cached_tokens = 4
    assert course.prefill_chunks() == [(0.0, 0.1, 4), (0.2, 0.3, 2)]
    stretch = Stretch()
    stretch.add(1.0, 1.5)
    stretch.add(3.0, 3.25)
    assert (stretch.begin, stretch.end, stretch.busy_seconds, stretch.count) == (1.0, 3.25, 0.75, 2)


def test_nothing_of_it_is_loaded_where_it_is_off() -> None:
    code = "import sys, server.app; sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    assert Tracing.from_settings(Settings()) is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SettingsProblem, match=r"octavo\[tracing\]"):
        Tracing.from_settings(Settings(otlp_endpoint="http://127.0.0.1:4318"))
