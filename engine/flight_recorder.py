"""The last steps of the engine, kept by the server: what to look at when the engine has died.

It holds numbers only: which requests ran how many tokens, what was decided, how the blocks stood; no token, no text.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.core.plan import SeqId
from engine.types import StepStats
from engine.wire import StepBegun

logger = logging.getLogger(__name__)

MAX_FILES = 20  # dumps that are kept in a folder, the newest

Record = dict[str, Any]  # JSON


@dataclass(slots=True)
class _Step:
    life: int
    begun: StepBegun
    begun_at: float
    stats: StepStats | None = None
    done_at: float | None = None


class FlightRecorder:
    """A ring of the last `num_steps` steps; noting one costs an append. Times are Unix seconds."""

    def __init__(self, num_steps: int) -> None:
        self._steps: deque[_Step] = deque(maxlen=num_steps)

    def begun(self, life: int, event: StepBegun, now: float) -> None:
        """A step of the engine's `life` starts to run."""
        self._steps.append(_Step(life, event, now))

    def done(self, stats: StepStats, now: float) -> None:
        """The step that `stats` name has run."""
        for step in reversed(self._steps):
            if step.begun.step_id == stats.step_id:
                step.stats, step.done_at = stats, now
                return

    def records(self) -> list[Record]:
        """The steps, oldest first."""
        return [_describe(step) for step in self._steps]


def _describe(step: _Step) -> Record:
    begun = step.begun
    return {
        "life": step.life,
        "step": begun.step_id,
        "begun_at": step.begun_at,
        "done_at": step.done_at,
        "sequences": [
            {"sequence": _name(seq_id), "tokens": num_tokens}
            for seq_id, num_tokens in zip(begun.seq_ids, begun.num_tokens, strict=True)
        ],
        "admitted": [_name(seq_id) for seq_id in begun.admitted],
        "forgotten": [_name(seq_id) for seq_id in begun.forgotten],
        "blocks_copied": begun.blocks_copied,
        "blocks_swapped_out": begun.blocks_swapped_out,
        "blocks_swapped_in": begun.blocks_swapped_in,
        "stats": None if step.stats is None else asdict(step.stats),
    }


def _name(seq_id: SeqId) -> str:
    """request.choice"""
    return f"{seq_id.request_id}.{seq_id.choice_index}"


def write_dump(folder: Path, record: Mapping[str, Any]) -> Path | None:
    """A file of its own for this record; the oldest in the folder go. None, and a line in the log, if that fails."""
    written_at = datetime.now(UTC)
    path = folder / f"engine-{written_at:%Y%m%dT%H%M%S.%f}-{os.getpid()}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"written_at": written_at.isoformat(), **record}, indent=1), encoding="utf-8")
        for old in sorted(folder.glob("engine-*.json"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("the flight record could not be written: %s", error)
        return None
    return path
