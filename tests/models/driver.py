"""Runs token ids through a Decoder, the way the runner does, and gives the logits of every position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.core.plan import BlockTableTail
from engine.models.config import KVGroup
from engine.models.decoder import Decoder
from engine.runner.input_buffers import InputBuffers
from kernels.interface import Array, DType, KernelSet, KVCacheSpec

BLOCK_SIZE = 4
_MAX_NUM_SEQS = 8


class Driver:
    """Sequences (numbered from 0) with block tables of scattered blocks; one call of `step` is one forward pass."""

    def __init__(self, decoder: Decoder, kernels: KernelSet, num_blocks: int = 128, release: bool = False) -> None:
        """With `release`, blocks that have left a group's window are handed to whoever comes next."""
        self._decoder = decoder
        self._kernels = kernels
        self._release = release
        self._num_blocks = num_blocks
        self._inputs = InputBuffers(
            kernels,
            [self._new_cache(group) for group in decoder.kv_groups],
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=decoder.max_num_batched_tokens,
            max_num_seqs=_MAX_NUM_SEQS,
            max_blocks=num_blocks,
        )
        order = [int(block) for block in np.random.default_rng(0).permutation(np.arange(1, num_blocks))]
        self._free_blocks = [list(order) for _ in decoder.kv_groups]
        self._tables: dict[int, list[list[int]]] = {}  # sequence → group → block ids
        self._lengths: dict[int, int] = {}

    def step(self, pieces: Sequence[tuple[int, Sequence[int]]]) -> list[npt.NDArray[np.float32]]:
        """Run (sequence, its next token ids) together; the logits [tokens, V] of each piece."""
        starts = [self._lengths.get(seq, 0) for seq, _ in pieces]
        counts = [len(tokens) for _, tokens in pieces]
        for (seq, _), start, count in zip(pieces, starts, counts, strict=True):
            self._lengths[seq] = start + count
            self._update_tables(seq, start)
        batch = self._inputs.fill(
            token_ids=[token for _, tokens in pieces for token in tokens],
            slots=[seq for seq, _ in pieces],
            starts=starts,
            num_tokens=counts,
            logits_rows=range(sum(counts)),
        )
        hidden = self._decoder.forward(batch)
        logits: Array = self._kernels.empty((sum(counts), self._decoder.config.vocab_size), DType.FLOAT32)
        self._decoder.logits(hidden, logits)
        return np.split(self._kernels.download(logits), np.cumsum(counts)[:-1])

    def run(self, seq: int, tokens: Sequence[int], chunk: int | None = None) -> npt.NDArray[np.float32]:
        """One sequence alone, whole or in chunks: logits of every position [tokens, V]."""
        size = chunk or len(tokens)
        pieces = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        return np.concatenate([self.step([(seq, piece)])[0] for piece in pieces])

    def blocks_in_use(self) -> list[int]:
        """Per KV group."""
        return [self._num_blocks - 1 - len(free) for free in self._free_blocks]

    def _new_cache(self, group: KVGroup) -> Array:
        return self._kernels.new_kv_cache(
            KVCacheSpec(
                num_layers=len(group.layers),
                num_blocks=self._num_blocks,
                block_size=BLOCK_SIZE,
                num_kv_heads=group.num_kv_heads,
                head_dim=group.head_dim,
                value_head_dim=group.head_dim,
                dtype=self._kernels.activation_dtype,
            )
        )

    def _update_tables(self, seq: int, start: int) -> None:
        """Give back what no query from position `start` on can see, take what the new tokens need."""
        tables = self._tables.setdefault(seq, [[] for _ in self._free_blocks])
        for group, table, free in zip(self._decoder.kv_groups, tables, self._free_blocks, strict=True):
            if self._release and group.window is not None:
                for index in range(max(0, start - group.window + 1) // BLOCK_SIZE):
                    if table[index]:
                        free.append(table[index])
                        table[index] = 0
            while len(table) * BLOCK_SIZE < self._lengths[seq]:
                table.append(free.pop())
        self._inputs.update_tables(seq, [BlockTableTail(0, tuple(table)) for table in tables])
