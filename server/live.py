"""The engine's steps as events for the page: gathered while somebody watches, sent some times a second."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from engine.types import CacheBranch, StepStats
from engine.wire import StepBegun
from server.sse import frame
from server.state import Server

_INTERVAL_SECONDS = 0.1
_MAX_STEPS = 100  # of one event; of a faster engine the latest are shown
_MAX_SEQUENCES = 64  # of one step
_MAX_BRANCHES = 48  # of the prefix cache's tree
_BRANCHES_EVERY = 10  # events: looking at the tree takes the engine's time


class StepFeed:
    """What one watcher has not been told yet."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, Any]] = deque(maxlen=_MAX_STEPS)
        self._since = time.monotonic()
        self._num_steps = 0
        self._num_tokens = 0

    def note(self, stats: StepStats, begun: StepBegun) -> None:
        """Called after every step; decodes come first in it, one token each."""
        self._num_steps += 1
        self._num_tokens += stats.num_prefill_tokens + stats.num_decode_tokens
        sequences = zip(begun.seq_ids[:_MAX_SEQUENCES], begun.num_tokens, strict=False)
        self._steps.append(
            {
                "id": stats.step_id,
                "decodes": stats.num_decode_tokens,
                "seqs": [(request_id, choice, tokens) for (request_id, choice), tokens in sequences],
            }
        )

    def take(self, stats: StepStats | None) -> dict[str, Any]:
        """The news since the last call, and the state now."""
        now = time.monotonic()
        seconds = max(1e-3, now - self._since)
        news = {
            "steps": list(self._steps),
            "running": stats.num_running if stats is not None else 0,
            "waiting": stats.num_waiting if stats is not None else 0,
            "steps_per_second": self._num_steps / seconds,
            "tokens_per_second": self._num_tokens / seconds,
            "hit_ratio": _hit_ratio(stats),
            "kv": [
                {"free": group.free, "private": group.private, "shared": group.shared, "cached": group.cached}
                for group in (stats.kv_groups if stats is not None else ())
            ],
        }
        self._steps.clear()
        self._since, self._num_steps, self._num_tokens = now, 0, 0
        return news


def _hit_ratio(stats: StepStats | None) -> float | None:
    if stats is None or stats.prefix_query_tokens_total == 0:
        return None
    return stats.prefix_hit_tokens_total / stats.prefix_query_tokens_total


def _branch(branch: CacheBranch) -> tuple[int, int, int, int, int]:
    """As live.js takes it."""
    return branch.parent, branch.start_tokens, branch.num_tokens, branch.subtree_tokens, branch.num_sequences


async def live_events(server: Server) -> AsyncGenerator[bytes]:
    """Events for as long as somebody reads and the server takes requests. Raises NotReady before the model is there."""
    engine = server.serving().engine
    feed = StepFeed()
    engine.add_step_listener(feed.note)
    try:
        for number in itertools.count():
            if server.draining:
                break
            news = feed.take(engine.stats())
            if number % _BRANCHES_EVERY == 1:  # the first answer has come by now
                news["tree"] = [_branch(branch) for branch in engine.look_at_cache(_MAX_BRANCHES)]
            elif number == 0:
                engine.look_at_cache(_MAX_BRANCHES)
            yield frame(orjson.dumps(news))
            await asyncio.sleep(_INTERVAL_SECONDS)
    finally:
        engine.remove_step_listener(feed.note)
