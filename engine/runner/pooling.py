"""Hidden states of a prompt to one vector, chunk by chunk."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.runner.sequence_state import SequenceState
from engine.types import Pooling
from kernels.interface import Array, KernelSet


def pool_chunk(kernels: KernelSet, state: SequenceState, hidden: Array, end_position: int) -> tuple[float, ...]:
    """Take the hidden states [n, H] of the prompt's next chunk, which ends before `end_position`.

    The vector once the prompt is complete, as the model leaves it (not normalised); before, an empty tuple.
    """
    complete = end_position == len(state.record.prompt_token_ids)
    if state.record.pooling is Pooling.LAST:
        if not complete:
            return ()
        vector: npt.NDArray[np.float64] = kernels.download(hidden[-1:])[0].astype(np.float64)
    else:
        total = kernels.download(hidden).astype(np.float64).sum(axis=0)
        state.pool_sum = total if state.pool_sum is None else state.pool_sum + total
        if not complete:
            return ()
        vector = state.pool_sum / end_position
    return tuple(vector.tolist())
