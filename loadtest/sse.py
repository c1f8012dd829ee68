"""Server-sent events: bytes in, the data of whole events out."""

from __future__ import annotations


class SseReader:
    """Cuts a byte stream into events. Only `data` matters here; comments and other fields are skipped."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that `data` completes, in order; several data lines are joined by newlines."""
        buffer = self._buffer + data if self._buffer else data
        if b"\r" in buffer:
            # a lone \r at the very end may be half of \r\n: it stays until the next call
            tail = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer[: len(buffer) - len(tail)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + tail
        *events, self._buffer = buffer.split(b"\n\n")
        return [payload for event in events if (payload := _data_of(event)) is not None]


def _data_of(event: bytes) -> bytes | None:
    if b"\n" not in event:
        return _value(event) if event.startswith(b"data:") else None
    lines = [_value(line) for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def _value(line: bytes) -> bytes:
    return line[6:] if line.startswith(b"data: ") else line[5:]
