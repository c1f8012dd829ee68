"""Reads one OpenAI answer: when each piece of text came, how it ended, what the server counted."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from loadtest.sse import SseReader

_MAX_ERROR_BYTES = 65536


class AnswerReader:
    """The receiver of one streamed completion or chat completion (first choice only).

    `error` is None while all is well, else: http_STATUS, not_streamed, stream_error, protocol, truncated.
    """

    def __init__(self, on_text: Callable[[], None], leave_after_chunks: int | None = None) -> None:
        self._on_text = on_text
        self._leave_after_chunks = leave_after_chunks
        self._sse = SseReader()
        self._raw = b""  # the body of an answer that is no stream
        self._is_stream = False
        self._pieces: list[str] = []
        self.left = False
        self.status: int | None = None
        self.token_times: list[float] = []
        self.ended_at: float | None = None  # arrival of [DONE]
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.error: str | None = None
        self.detail = ""

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._pieces)

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self._is_stream = status == 200 and "text/event-stream" in headers.get("content-type", "")

    def on_body(self, data: bytes, now: float) -> None:
        if not self._is_stream:
            self._raw = (self._raw + data)[:_MAX_ERROR_BYTES]
            return
        for payload in self._sse.feed(data):
            self._on_event(payload, now)

    def finish(self) -> None:
        """Call when the response is complete: settles what only its end can tell."""
        if self.status is not None and self.status != 200:
            self.error, self.detail = f"http_{self.status}", self._raw.decode("utf-8", "replace")[:500]
        elif not self._is_stream:
            self.error, self.detail = "not_streamed", self._raw.decode("utf-8", "replace")[:500]
        elif self.error is None and not self.left and self.ended_at is None and self.finish_reason is None:
            self.error = "truncated"

    def _on_event(self, payload: bytes, now: float) -> None:
        if payload.startswith(b"[DONE]"):
            self.ended_at = now
            return
        try:
            event = orjson.loads(payload)
            if event.get("error"):
                self.error, self.detail = "stream_error", payload.decode("utf-8", "replace")[:500]
                return
            self._on_chunk(event, now)
        except (orjson.JSONDecodeError, TypeError, AttributeError, KeyError) as error:
            self.error, self.detail = "protocol", f"{error}: {payload[:200]!r}"

    def _on_chunk(self, event: dict[str, object], now: float) -> None:
        for choice in event.get("choices") or ():  # type: ignore[attr-defined]
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else _delta_text(delta)
            if text:
                self.token_times.append(now)
                self._pieces.append(text)
                self._on_text()
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        usage = event.get("usage")
        if usage:
            self._on_usage(usage)  # type: ignore[arg-type]
        if self._leave_after_chunks is not None and len(self.token_times) >= self._leave_after_chunks:
            self.left = True

    def _on_usage(self, usage: dict[str, object]) -> None:
        self.prompt_tokens = _integer(usage.get("prompt_tokens"))
        self.completion_tokens = _integer(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _integer(details.get("cached_tokens"))


def _delta_text(delta: dict[str, object]) -> str:
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    return text if isinstance(text, str) else ""


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None
