"""Reads one streamed completion in a process of its own and prints the gaps between its pieces once its standard
input ends.

    python -m tests.e2e.stream_probe HOST PORT [API_KEY]
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time


def main() -> None:
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 8000, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += "".join(f"authorization: Bearer {key}\r\n" for key in sys.argv[3:])
    gaps: list[float] = []
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        connection.recv(1 << 16)
        print("reading", flush=True)  # noqa: T201
        last = time.monotonic()
        while not select.select([sys.stdin], [], [], 0)[0] and connection.recv(1 << 16):
            now = time.monotonic()
            gaps.append(now - last)
            last = now
    json.dump(gaps, sys.stdout)


if __name__ == "__main__":
    main()
