"""Asks /health every 20 ms from a process of its own and prints the latencies once its standard input ends.

python -m tests.e2e.health_probe HOST PORT
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time


def main() -> None:
    connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=30)
    latencies = []
    print("reading", flush=True)  # noqa: T201
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        start = time.monotonic()
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        latencies.append(time.monotonic() - start if response.status == 200 else float("inf"))
    json.dump(latencies, sys.stdout)


if __name__ == "__main__":
    main()
