"""How well KV memory would be used: what requests hold against what allocation schemes set aside for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadtest.report import RequestRow


class MemoryUse(Struct, frozen=True):
    """Tokens of KV memory over time; every array is [times]."""

    times: NDArray[np.float64]  # seconds
    held: NDArray[np.float64]  # tokens that exist
    paged: NDArray[np.float64]  # set aside in blocks
    reserved: NDArray[np.float64]  # set aside for the longest request that the workload has

    def efficiency(self, set_aside: NDArray[np.float64]) -> float:
        """Held ÷ set aside, over the time that anything was set aside."""
        total = float(set_aside.sum())
        return float(self.held.sum()) / total if total else 1.0


def memory_use(requests: Sequence[RequestRow], block_size: int = 16, num_points: int = 500) -> MemoryUse:
    """Holds a request's prompt from its first token on, and its outputs as they come, evenly until its end.

    Seen from the client: what the server holds before the first token shows is not known and left out.
    """
    rows = [row for row in requests if row.token_times]
    end = max((row.token_times[-1] for row in rows), default=0.0)
    times = np.linspace(0.0, end, num_points)
    held, paged, reserved = (np.zeros(num_points) for _ in range(3))
    longest = max((row.prompt_tokens + row.max_tokens for row in rows), default=0)
    for row in rows:
        first, last = row.token_times[0], row.token_times[-1]
        alive = (times >= first) & (times <= last)
        share = (times[alive] - first) / (last - first) if last > first else 0.0
        tokens = row.prompt_tokens + np.floor(1 + share * (row.output_tokens - 1))
        held[alive] += tokens
        paged[alive] += np.ceil(tokens / block_size) * block_size
        reserved[alive] += longest
    return MemoryUse(times, held, paged, reserved)
