"""Sends requests over pooled raw-socket connections and records what came back.

Kinds of failure in `RequestRecord.error`:
    connect       no connection                       http_STATUS   an error status
    disconnected  closed or reset half-way            not_streamed  200, but no event stream
    timeout       longer than the request's limit     stream_error  an error event in the stream
    unfinished    still running when the run ended    protocol      events that are not OpenAI's
    truncated     ended without finish reason         accepted      nonsense that should have been refused
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from loadtest.connection import Clock, Connection, ConnectionLost, Receiver
from loadtest.payload import generation_request, http_request
from loadtest.records import Request, RequestRecord
from loadtest.stream import AnswerReader
from loadtest.target import Target
from loadtest.workloads import Manners

_CONNECT_TIMEOUT_SECONDS = 10.0
_LEAVE_AFTER_CHUNKS = 4
_DAWDLE_SECONDS = 0.2
_REFUSALS = frozenset(f"http_{status}" for status in (400, 413, 422))


class Client:
    """A pool of keep-alive connections to one target. Single event loop; not for sharing between threads."""

    def __init__(self, target: Target, clock: Clock, endpoint: str, request_timeout_seconds: float = 300.0) -> None:
        self.target = target
        self.endpoint = endpoint
        self._request_timeout_seconds = request_timeout_seconds
        self._clock = clock
        self._idle: list[Connection] = []
        self._ssl = ssl.create_default_context() if target.tls else None

    async def send(
        self,
        request: Request,
        scheduled_at: float,
        *,
        deadline: float = float("inf"),
        on_text: Callable[[], None] = lambda: None,
    ) -> RequestRecord:
        """Sends one request and reads its answer to the end, to its time-out or to `deadline` (on the clock).

        Never raises for what the server does: failures are in the record.
        """
        sent_at = self._clock()
        leave_after = _LEAVE_AFTER_CHUNKS if request.manners is Manners.LEAVES else None
        reader = AnswerReader(on_text, leave_after)
        pause = _DAWDLE_SECONDS if request.manners is Manners.DAWDLES else 0.0
        limit = min(self._request_timeout_seconds, deadline - sent_at)
        try:
            async with asyncio.timeout(limit):
                data = generation_request(self.target, request, self.endpoint)
                await self._exchange(data, reader, pause)
            reader.finish()
        except TimeoutError:
            timed_out = limit == self._request_timeout_seconds
            reader.error = "timeout" if timed_out else "unfinished"
        except ConnectionLost as error:
            reader.error, reader.detail = "disconnected", str(error)
        except OSError as error:
            reader.error, reader.detail = "connect", str(error)
        return self._record(request, reader, scheduled_at, sent_at)

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """One plain exchange: (status, body). Raises OSError, ConnectionLost or TimeoutError."""
        answer = _PlainReader()
        async with asyncio.timeout(self._request_timeout_seconds):
            await self._exchange(http_request(self.target, method, path, body), answer, 0.0)
        return answer.status, answer.body

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, data: bytes, receiver: Receiver, pause_seconds: float) -> None:
        while True:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._connect()
            try:
                await connection.exchange(data, receiver, pause_seconds)
            except ConnectionLost as error:
                # the server may close an idle connection just as we use it: that says nothing about the request
                if error.untouched and reused:
                    continue
                raise
            if connection.reusable:
                self._idle.append(connection)
            return

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._clock),
                    self.target.address,
                    self.target.port,
                    ssl=self._ssl,
                    server_hostname=self.target.host if self._ssl else None,
                )
        except TimeoutError as error:
            raise OSError(f"no connection within {_CONNECT_TIMEOUT_SECONDS:g} s") from error
        return connection

    def _record(self, request: Request, reader: AnswerReader, scheduled_at: float, sent_at: float) -> RequestRecord:
        ended_at = self._clock() if reader.ended_at is None or reader.error else reader.ended_at
        return RequestRecord(
            request=request,
            scheduled_at=scheduled_at,
            sent_at=sent_at,
            ended_at=ended_at,
            token_times=tuple(reader.token_times),
            prompt_tokens=reader.prompt_tokens,
            completion_tokens=reader.completion_tokens,
            cached_tokens=reader.cached_tokens,
            status=reader.status,
            finish_reason=reader.finish_reason,
            error=_judge(request.manners, reader.error),
            detail=reader.detail,
            text=reader.text,
        )


def _judge(manners: Manners, error: str | None) -> str | None:
    """Turns what happened into success or failure of a request with such manners."""
    if manners in (Manners.MALFORMED, Manners.IMPOSSIBLE):
        if error in _REFUSALS:
            return None
        return error or "accepted"
    return error


class _PlainReader:
    left = False

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        self.body += data
