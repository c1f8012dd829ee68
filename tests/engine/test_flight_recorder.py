"""What the server remembers of the engine's last steps, and where it goes when the engine dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.plan import SeqId
from engine.flight_recorder import MAX_FILES, FlightRecorder, write_dump
from engine.types import KVGroupStats, StepStats
from engine.wire import StepBegun

Start = Callable[..., Any]


def stats_of(step_id: int) -> StepStats:
    return StepStats(step_id, 1, 0, 3, 0, (KVGroupStats(5, 1, 0, 0),), 13, 0, 0, 0, 0, 0, 0, 0)


def test_the_last_steps_are_kept_with_what_was_decided() -> None:
    recorder = FlightRecorder(2)
    for step_id in (1, 2, 3):
        seq_ids = (SeqId(1, 0), SeqId(7, 2))
        recorder.begun(4, StepBegun(step_id, seq_ids, (1, 30), (SeqId(7, 2),), (SeqId(3, 0),), 1, 2, 3), 10.0 + step_id)
        if step_id < 3:
            recorder.done(stats_of(step_id), 10.5 + step_id)
    second, third = recorder.records()
    assert third == {
        "life": 4,
        "step": 3,
        "begun_at": 13.0,
        "done_at": None,
        "sequences": [{"sequence": "1.0", "tokens": 1}, {"sequence": "7.2", "tokens": 30}],
        "admitted": ["7.2"],
        "forgotten": ["3.0"],
        "blocks_copied": 1,
        "blocks_swapped_out": 2,
        "blocks_swapped_in": 3,
        "stats": None,
    }
    assert (second["step"], second["done_at"], second["stats"]["kv_groups"][0]["free"]) == (2, 12.5, 5)
    recorder.done(stats_of(99), 20.0)  # of a step that is no longer here
    assert recorder.records() == [second, third]


def test_dumps_are_files_of_their_own_and_the_oldest_go(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    paths = [write_dump(folder, {"number": number}) for number in range(MAX_FILES + 3)]
    assert all(paths)
    kept = sorted(folder.iterdir())
    assert kept == paths[3:]
    assert json.loads(kept[-1].read_text())["number"] == MAX_FILES + 2


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert write_dump(file / "below", {}) is None
    assert "could not be written" in caplog.text


async def test_when_the_engine_dies_its_last_steps_are_written_down(
    start: Start, harness: Any, bench: Any, tmp_path: Path
) -> None:
    client = await start(replace(harness.quick, flight_steps=8, flight_folder=tmp_path), step_seconds=0.005)
    request = harness.request(client, 60, n=2, tenant=3, priority=-1)
    stream = client.submit(request)
    await harness.until(lambda: client.stats() and client.stats().step_id >= 12)
    pid = client.engine_pid
    os.kill(pid, signal.SIGKILL)
    assert await harness.tokens(stream) == bench().generate(request)
    [path] = tmp_path.iterdir()  # noqa: ASYNC240
    dump = json.loads(path.read_text())
    assert "SIGKILL" in dump["reason"]
    assert len(dump["steps"]) == 8
    last = dump["steps"][-1]
    assert last["sequences"] == [{"sequence": f"{request.request_id}.{k}", "tokens": 1} for k in (0, 1)]
    [open_request] = dump["open_requests"]
    assert (open_request["tenant"], open_request["priority"], open_request["prompt_tokens"]) == (3, -1, 19)
    assert [choice["output_tokens"] >= 9 for choice in open_request["choices"]] == [True, True]
    assert dump["config"]["executor"] == "fake"
    assert str(request.prompt_token_ids[3:9])[1:-1] not in path.read_text()  # numbers about requests, not their tokens


async def test_the_record_can_be_asked_for_while_the_engine_runs(start: Start, harness: Any) -> None:
    client = await start()
    await harness.tokens(client.submit(harness.request(client, 5)))
    record = json.loads(json.dumps(client.flight_record()))
    assert (record["state"], record["pid"], record["open_requests"]) == ("ready", client.engine_pid, [])
    assert [step["step"] for step in record["steps"]] == [1, 2, 3, 4, 5]
    assert all(step["stats"]["num_running"] <= 1 and step["done_at"] >= step["begun_at"] for step in record["steps"])
