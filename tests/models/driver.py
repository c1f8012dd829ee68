"""Runs token ids through a Decoder, the way the runner does, and gives the logits of every position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.models.decoder import Decoder
from engine.models.forward_batch import ForwardBatch, GroupBatch
from kernels.interface import DType, KernelSet, KVCacheSpec

BLOCK_SIZE = 4


class Driver:
    """Sequences with block tables of scattered blocks; one call of `step` is one forward pass."""

    def __init__(self, decoder: Decoder, kernels: KernelSet, num_blocks: int = 64, release: bool = False) -> None:
        """With `release`, blocks that have left a group's window are handed to whoever comes next."""
        self._decoder = decoder
        self._release = release
        self._kernels = kernels
        self._caches = [
            kernels.new_kv_cache(
                KVCacheSpec(
                    num_layers=len(group.layers),
                    num_blocks=num_blocks,
                    block_size=BLOCK_SIZE,
                    num_kv_heads=group.num_kv_heads,
                    head_dim=group.head_dim,
                    value_head_dim=group.head_dim,
                    dtype=kernels.activation_dtype,
                )
            )
            for group in decoder.kv_groups
        ]
        order = np.random.default_rng(0).permutation(np.arange(1, num_blocks))
        self._free_blocks = [[int(block) for block in order] for _ in decoder.kv_groups]
        self._num_blocks = num_blocks
        self._tables: dict[int, list[list[int]]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, pieces: Sequence[tuple[int, Sequence[int]]]) -> list[npt.NDArray[np.float32]]:
        """Run (sequence, its next token ids) together; the logits [tokens, V] of each piece."""
        starts = [self._lengths.get(seq, 0) for seq, _ in pieces]
        for (seq, tokens), start in zip(pieces, starts, strict=True):
            self._lengths[seq] = start + len(tokens)
            self._shrink(seq, start)
            self._grow(seq)
        batch = self._batch(pieces, starts)
        hidden = self._decoder.forward(batch)
        logits = self._kernels.empty((batch.num_tokens, self._decoder.config.vocab_size), DType.FLOAT32)
        self._decoder.logits(hidden, logits)
        ends = np.cumsum([len(tokens) for _, tokens in pieces])
        return np.split(self._kernels.download(logits), ends[:-1])

    def run(self, seq: int, tokens: Sequence[int], chunk: int | None = None) -> npt.NDArray[np.float32]:
        """One sequence alone, whole or in chunks: logits of every position [tokens, V]."""
        size = chunk or len(tokens)
        pieces = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        return np.concatenate([self.step([(seq, piece)])[0] for piece in pieces])

    def blocks_in_use(self) -> list[int]:
        """Per KV group."""
        return [self._num_blocks - 1 - len(free) for free in self._free_blocks]

    def _shrink(self, seq: int, start: int) -> None:
        """Entries that no query from position `start` on can see become the null block."""
        for group, window in enumerate(group.window for group in self._decoder.kv_groups):
            if not self._release or window is None or seq not in self._tables:
                continue
            table = self._tables[seq][group]
            for index in range(max(0, start - window + 1) // BLOCK_SIZE):
                if table[index]:
                    self._free_blocks[group].append(table[index])
                    table[index] = 0

    def _grow(self, seq: int) -> None:
        tables = self._tables.setdefault(seq, [[] for _ in self._caches])
        needed = -(-self._lengths[seq] // BLOCK_SIZE)
        for table, free in zip(tables, self._free_blocks, strict=True):
            while len(table) < needed:
                table.append(free.pop())

    def _batch(self, pieces: Sequence[tuple[int, Sequence[int]]], starts: Sequence[int]) -> ForwardBatch:
        counts = [len(tokens) for _, tokens in pieces]
        positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        groups = [
            GroupBatch(
                kv_cache=cache,
                block_tables=self._int32(self._padded([self._tables[seq][group] for seq, _ in pieces])),
                slot_mapping=self._kernels.upload(
                    np.concatenate(
                        [
                            np.array(self._tables[seq][group])[where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE
                            for (seq, _), where in zip(pieces, positions, strict=True)
                        ]
                    ).astype(np.int64)
                ),
            )
            for group, cache in enumerate(self._caches)
        ]
        return ForwardBatch(
            token_ids=self._int32(np.concatenate([np.array(tokens) for _, tokens in pieces])),
            positions=self._int32(np.concatenate(positions)),
            query_start_loc=self._int32(np.concatenate([[0], np.cumsum(counts)])),
            seq_lens=self._int32(np.array([self._lengths[seq] for seq, _ in pieces])),
            logits_rows=self._int32(np.arange(sum(counts))),
            groups=tuple(groups),
        )

    def _int32(self, values: npt.NDArray[Any]) -> Any:
        return self._kernels.upload(values.astype(np.int32))

    @staticmethod
    def _padded(tables: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
        width = max(len(table) for table in tables)
        return np.array([[*table, *[-7] * (width - len(table))] for table in tables], np.int32)
