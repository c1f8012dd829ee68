"""The step's index arrays: assembled on the host, written into persistent device buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.core.plan import BlockTableTail
from engine.models.forward_batch import ForwardBatch, GroupBatch
from kernels.interface import Array, DType, KernelSet


class InputBuffers:
    """Buffers for the largest step, and the block tables of all sequences by slot.

    The caches are [group]; a block table has room for `max_blocks` entries.
    """

    def __init__(
        self,
        kernels: KernelSet,
        kv_caches: Sequence[Array],
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_blocks: int,
    ) -> None:
        self._kernels = kernels
        self._kv_caches = tuple(kv_caches)
        self._block_size = block_size
        groups = range(len(kv_caches))
        self._tables = [np.zeros((max_num_seqs, max_blocks), np.int32) for _ in groups]  # by slot
        self._token_ids = kernels.empty((max_num_batched_tokens,), DType.INT32)
        self._positions = kernels.empty((max_num_batched_tokens,), DType.INT32)
        self._query_start_loc = kernels.empty((max_num_seqs + 1,), DType.INT32)
        self._seq_lens = kernels.empty((max_num_seqs,), DType.INT32)
        self._logits_rows = kernels.empty((max_num_batched_tokens,), DType.INT32)
        self._slot_mappings = [kernels.empty((max_num_batched_tokens,), DType.INT64) for _ in groups]
        self._step_tables = [kernels.empty((max_num_seqs, max_blocks), DType.INT32) for _ in groups]

    def update_tables(self, slot: int, tails: Sequence[BlockTableTail]) -> None:
        """Write what changed in a sequence's block tables, one tail per group."""
        for table, (start, block_ids) in zip(self._tables, tails, strict=True):
            if block_ids:
                table[slot, start : start + len(block_ids)] = block_ids

    def fill(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        starts: Sequence[int],
        num_tokens: Sequence[int],
        logits_rows: Sequence[int],
    ) -> ForwardBatch:
        """Lay out a step. Per sequence, in the plan's order: its slot, the position of its first token, its number of
        tokens; `token_ids` are all of theirs in a row."""
        start_array, count_array = np.array(starts, np.int32), np.array(num_tokens, np.int32)
        query_start_loc = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(count_array, out=query_start_loc[1:])
        seq_of_token = np.repeat(np.arange(len(slots)), count_array)
        positions = np.arange(len(token_ids), dtype=np.int32) + (start_array - query_start_loc[:-1])[seq_of_token]
        seq_lens = start_array + count_array
        return ForwardBatch(
            token_ids=self._put(self._token_ids, np.array(token_ids, np.int32)),
            positions=self._put(self._positions, positions),
            query_start_loc=self._put(self._query_start_loc, query_start_loc),
            seq_lens=self._put(self._seq_lens, seq_lens),
            logits_rows=self._put(self._logits_rows, np.array(logits_rows, np.int32)),
            groups=self._groups(np.array(slots), seq_of_token, positions, int(seq_lens.max())),
        )

    def _groups(
        self,
        slots: npt.NDArray[np.intp],
        seq_of_token: npt.NDArray[np.intp],
        positions: npt.NDArray[np.int32],
        longest: int,
    ) -> tuple[GroupBatch, ...]:
        used_blocks = -(-longest // self._block_size)
        blocks, offsets = np.divmod(positions, np.int32(self._block_size))
        groups = []
        for group, kv_cache in enumerate(self._kv_caches):
            tables = self._tables[group][slots, :used_blocks]
            mapping = tables[seq_of_token, blocks].astype(np.int64) * self._block_size + offsets
            on_device = self._step_tables[group][: len(slots), :used_blocks]
            self._kernels.write(on_device, tables)
            groups.append(GroupBatch(kv_cache, on_device, self._put(self._slot_mappings[group], mapping)))
        return tuple(groups)

    def _put(self, buffer: Array, host: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> Array:
        view = buffer[: len(host)]
        self._kernels.write(view, host)
        return view
