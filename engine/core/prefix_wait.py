"""Waiting for a prefix that a running sequence is computing right now, instead of computing it again."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.request import Sequence, Status


def keeps_waiting(seq: Sequence, max_steps: int) -> bool:
    """Whether a sequence goes on waiting for the one it awaits; it does so in max_steps steps at most, all in all."""
    awaited = seq.awaited
    if awaited is None:
        return False
    if (
        awaited.status is Status.RUNNING
        and awaited.tables is not None
        and awaited.tables.num_committed_blocks < seq.awaited_blocks
        and seq.num_awaited_steps < max_steps
    ):
        seq.num_awaited_steps += 1
        return True
    seq.awaited = None
    return False


def starts_waiting(
    seq: Sequence, num_cached_blocks: int, under_way: Iterable[Sequence], block_size: int, max_steps: int
) -> bool:
    """Whether one of the sequences under way is about to add a block to the num_cached_blocks that there are of seq's
    prefix.

    If so, seq awaits as much of that prefix as both have in common.
    """
    max_blocks = seq.max_cached_tokens() // block_size
    if num_cached_blocks >= max_blocks or seq.num_awaited_steps >= max_steps:
        return False
    start = num_cached_blocks * block_size
    wanted = seq.token_ids[start : start + block_size]
    for other in under_way:
        if (
            other.token_ids[start : start + block_size] == wanted
            and other.request.cache_namespace == seq.request.cache_namespace
            and other.token_ids[:start] == seq.token_ids[:start]
        ):
            seq.awaited = other
            seq.awaited_blocks = num_cached_blocks + 1
            while seq.awaited_blocks < max_blocks and _same_block(seq, other, seq.awaited_blocks, block_size):
                seq.awaited_blocks += 1
            seq.num_awaited_steps += 1
            return True
    return False


def _same_block(seq: Sequence, other: Sequence, index: int, block_size: int) -> bool:
    start, end = index * block_size, (index + 1) * block_size
    return seq.token_ids[start:end] == other.token_ids[start:end]
