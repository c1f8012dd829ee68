"""The limits that are checked before work is done: how much waits, and what each key may use.

Everything here is synchronous and runs on the event loop. Each key has two buckets that refill evenly: requests are
taken on entry, tokens when they are known (the prompt's on entry, the answer's at its end, so a bucket may fall below
zero and the key waits until it has recovered).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from server.errors import QueueFull, RateLimited
from server.settings import Settings


class Bucket:
    """An allowance of `per_minute`, full at first, refilled evenly."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._updated = clock()

    def remaining(self) -> int:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._updated) * self.per_minute / 60)
        self._updated = now
        return math.floor(self._level + 1e-9)

    def take(self, amount: int) -> None:
        self.remaining()
        self._level -= amount

    def seconds_until(self, amount: int) -> float:
        """Until so much is there."""
        self.remaining()
        return max(0.0, (amount - self._level) * 60 / self.per_minute)


class Admission:
    """Counts what is in progress and lets requests in or raises a 429."""

    def __init__(
        self,
        settings: Settings,
        num_waiting: Callable[[], int],
        on_refusal: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_waiting` says how many sequences wait in the engine; `on_refusal` is told each refusal's reason."""
        self._settings = settings
        self._num_waiting = num_waiting
        self._on_refusal = on_refusal
        self._clock = clock
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self._active: Counter[str] = Counter()  # requests in progress by key
        self._num_choices = 0  # choices in progress
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_active(self) -> int:
        """Requests in progress."""
        return self._active.total()

    async def wait_idle(self) -> None:
        """Until nothing is in progress."""
        await self._idle.wait()

    @contextlib.contextmanager
    def enter(self, key: str, num_choices: int) -> Iterator[None]:
        """A request in progress for as long as the block runs. Raises QueueFull or RateLimited."""
        self._check(key)
        if (bucket := self._bucket(self._requests, key, self._settings.requests_per_minute)) is not None:
            bucket.take(1)
        self._active[key] += 1
        self._num_choices += num_choices
        self._idle.clear()
        try:
            yield
        finally:
            self._active[key] -= 1
            self._num_choices -= num_choices
            if self._active[key] == 0:
                del self._active[key]
            if not self._active:
                self._idle.set()

    def _check(self, key: str) -> None:
        settings = self._settings
        waiting = max(self._num_waiting(), self._num_choices - settings.max_num_seqs)
        if waiting >= settings.max_queued_requests:
            self._refuse("queue_full")
            raise QueueFull(f"{waiting} requests are waiting already; try again later")
        if settings.max_streams_per_key is not None and self._active[key] >= settings.max_streams_per_key:
            self._refuse("concurrency")
            raise RateLimited(
                f"{settings.max_streams_per_key} requests at once are allowed; wait for one to end",
                retry_after_seconds=1,
            )
        for kind, bucket in self._key_buckets(key):
            if bucket.remaining() < 1:
                self._refuse(f"{kind}_per_minute")
                raise RateLimited(
                    f"The allowance of {bucket.per_minute} {kind} a minute is used up",
                    retry_after_seconds=math.ceil(bucket.seconds_until(1)),
                )

    def charge_tokens(self, key: str, num_tokens: int) -> None:
        if (bucket := self._bucket(self._tokens, key, self._settings.tokens_per_minute)) is not None:
            bucket.take(num_tokens)

    def headers(self, key: str) -> dict[str, str]:
        """x-ratelimit-* of a key, for the limits that are set."""
        headers = {}
        for kind, bucket in self._key_buckets(key):
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, bucket.remaining()))
            headers[f"x-ratelimit-reset-{kind}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return headers

    def _key_buckets(self, key: str) -> Iterator[tuple[str, Bucket]]:
        for kind, buckets, limit in (
            ("requests", self._requests, self._settings.requests_per_minute),
            ("tokens", self._tokens, self._settings.tokens_per_minute),
        ):
            if (bucket := self._bucket(buckets, key, limit)) is not None:
                yield kind, bucket

    def _bucket(self, buckets: dict[str, Bucket], key: str, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        if key not in buckets:
            buckets[key] = Bucket(per_minute, self._clock)
        return buckets[key]

    def _refuse(self, reason: str) -> None:
        self._on_refusal(reason)
