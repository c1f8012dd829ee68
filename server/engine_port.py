"""What the server needs of an engine: the part of engine.client that it calls, for tests to stand in for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from engine.client import EngineStatus, StepListener
from engine.flight_recorder import Record
from engine.supervisor import Counters
from engine.types import EngineInfo, GenerationRequest, RequestUpdate, StepStats


class UpdateStream(Protocol):
    """The updates of one request, in lists as they arrive. Closing it early aborts the request."""

    @property
    def begun_at(self) -> float | None: ...

    def __aiter__(self) -> AsyncIterator[list[RequestUpdate]]: ...

    async def aclose(self) -> None: ...


class EnginePort(Protocol):
    """An engine, as engine.client.EngineClient documents it. All calls are made on the event loop."""

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def status(self) -> EngineStatus: ...

    @property
    def counters(self) -> Counters: ...

    @property
    def engine_pid(self) -> int | None: ...

    def flight_record(self) -> Record: ...

    def stats(self) -> StepStats | None: ...

    def longest_wait_seconds(self) -> float: ...

    def add_step_listener(self, listener: StepListener) -> None: ...

    def remove_step_listener(self, listener: StepListener) -> None: ...

    def new_request_id(self) -> int: ...

    def submit(self, request: GenerationRequest) -> UpdateStream: ...

    def abort(self, request_id: int, choice_index: int | None = None) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    async def close(self) -> None: ...
