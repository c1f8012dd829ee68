"""What one forward pass runs on: a step's tokens, packed."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.interface import Array


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Where one KV group's layers read and write."""

    kv_cache: Array
    block_tables: Array  # int32 [num_seqs, max_blocks]
    slot_mapping: Array  # int64 [num_tokens]; −1 = padding


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Device arrays of one step; views of persistent buffers, so that equal sizes mean equal addresses.

    Tokens of a sequence stand together, in the order of positions; sequences in the order of the plan.
    """

    token_ids: Array  # int32 [num_tokens]
    positions: Array  # int32 [num_tokens]
    query_start_loc: Array  # int32 [num_seqs + 1]
    seq_lens: Array  # int32 [num_seqs], tokens visible to attention after this step
    logits_rows: Array  # int32 [num_logits_rows]: which tokens' logits are wanted
    groups: tuple[GroupBatch, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_seqs(self) -> int:
        return int(self.seq_lens.shape[0])

    @property
    def num_logits_rows(self) -> int:
        return int(self.logits_rows.shape[0])

    @property
    def shape_class(self) -> tuple[int, int, int]:
        """Batches of one class run the same operations on the same buffers."""
        return self.num_tokens, self.num_seqs, self.num_logits_rows
