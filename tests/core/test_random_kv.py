"""Random conversations with the KV manager: forks at any time, several writers in one step, two-token texts.

What every sequence wrote must be found again through its tables, whoever else wrote, forked, evicted or ended.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import pytest

from engine.core.block_pool import NULL_BLOCK
from engine.core.block_tables import BlockTables
from engine.core.invariants import check_kv
from engine.core.kv_manager import KVManager
from engine.core.plan import BlockCopy, KVCapacity, KVGroupCapacity
from tests.core.driver import histories

NUM_OPERATIONS = 3_000  # a world; 20 worlds
MAX_STEP_TOKENS = 6


@dataclass
class Writer:
    namespace: int
    token_ids: list[int]
    num_computed_tokens: int
    tables: BlockTables

    def slots(self, group: int, block_size: int, start: int, end: int) -> list[tuple[int, int, int]]:
        """(block, offset, position) of the tokens start … end − 1."""
        ids = self.tables.block_ids[group]
        return [(ids[p // block_size], p % block_size, p) for p in range(start, end)]


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        windows: list[int | None] = self.rng.choice([[None], [None, 5], [3], [None, None, 2]])
        size = self.rng.choice([1, 2, 4])
        groups = [KVGroupCapacity(self.rng.randint(6, 24), window) for window in windows]
        self.kv = KVManager(
            KVCapacity(size, tuple(groups)),
            prefix_cache=self.rng.random() < 0.9,
            max_step_tokens=MAX_STEP_TOKENS,
        )
        self.size = size
        self.memory: list[dict[tuple[int, int], int]] = [{} for _ in windows]
        self.writers: list[Writer] = []
        self.log = [f"{groups} of {size}"]

    def operate(self) -> None:
        names = ["admit", "step", "step", "step", "fork", "release", "reset"]
        [name] = self.rng.choices(names, [3, 3, 3, 3, 1.5, 1, 0.1])
        if not self.writers:
            name = "admit"
        elif len(self.writers) > 5 and name in ("admit", "fork"):
            name = "release"
        self.log.append(name)
        getattr(self, name)()
        check_kv(self.kv, [writer.tables for writer in self.writers])
        for writer in self.writers:
            self.read(writer)

    def admit(self) -> None:
        tokens = [self.rng.choice([0, 0, 0, 1]) for _ in range(self.rng.randint(1, 20))]
        namespace = self.rng.choice([0, 0, 1])
        match = self.kv.match(namespace, tokens, len(tokens) - 1)
        assert match.num_blocks * self.size < len(tokens)
        self.log[-1] += f" {tokens} of {namespace}: {match.block_ids}"
        if self.kv.fits(match, len(tokens), [0] * len(self.kv.pools)):
            tables = self.kv.admit(namespace, match)
            self.writers.append(Writer(namespace, tokens, match.num_blocks * self.size, tables))

    def fork(self) -> None:
        parent = self.rng.choice(self.writers)
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            self.log[-1] += f" {self.writers.index(parent)}"
            tables = self.kv.fork(parent.tables)
            self.writers.append(Writer(parent.namespace, list(parent.token_ids), parent.num_computed_tokens, tables))

    def step(self) -> None:
        """Some sequences run some tokens at once: make room for all, copy, write all, commit."""
        running: list[tuple[Writer, int]] = []
        for index in self.rng.sample(range(len(self.writers)), self.rng.randint(1, len(self.writers))):
            writer = self.writers[index]
            wanted = self.rng.randint(1, MAX_STEP_TOKENS)
            missing = writer.num_computed_tokens + wanted - len(writer.token_ids)
            writer.token_ids += [self.rng.randrange(2) for _ in range(missing)]
            granted = self.kv.grow(writer.tables, writer.num_computed_tokens, wanted)
            self.log[-1] += f" {index}:{granted}/{wanted}"
            assert 0 <= granted <= wanted
            if granted:
                running.append((writer, granted))
        self.copy(self.kv.take_copies())
        for writer, granted in running:
            start, end = writer.num_computed_tokens, writer.num_computed_tokens + granted
            own = histories(writer.namespace, writer.token_ids)
            for group, memory in enumerate(self.memory):
                for block_id, offset, position in writer.slots(group, self.size, start, end):
                    assert block_id != NULL_BLOCK
                    memory[block_id, offset] = own[position]
            writer.num_computed_tokens = end
        for writer, _ in running:
            self.kv.commit(writer.tables, writer.token_ids, writer.num_computed_tokens)

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        before = [dict(memory) for memory in self.memory]
        assert not {c[:2] for c in copies} & {(c.group, c.target) for c in copies}
        for group, source, target in copies:
            for offset in range(self.size):
                if (source, offset) in before[group]:
                    self.memory[group][target, offset] = before[group][source, offset]

    def release(self) -> None:
        writer = self.writers.pop(self.rng.randrange(len(self.writers)))
        self.kv.release(writer.tables, writer.token_ids)

    def reset(self) -> None:
        self.kv.reset_prefix_cache()
        assert all(pool.num_cached == 0 for pool in self.kv.pools)

    def read(self, writer: Writer) -> None:
        """All that the next token will see is what this sequence has computed."""
        own = histories(writer.namespace, writer.token_ids)
        for group, window in enumerate(self.kv.windows):
            end = writer.num_computed_tokens
            start = 0 if window is None else max(0, end - window + 1)
            for block_id, offset, position in writer.slots(group, self.size, start, end):
                assert self.memory[group].get((block_id, offset)) == own[position]


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_finds_what_it_wrote(seed: int) -> None:
    world = World(seed)
    try:
        for _ in range(NUM_OPERATIONS):
            world.operate()
        while world.writers:
            world.release()
        check_kv(world.kv, [])
    except BaseException:
        sys.stdout.write("\n".join([f"seed {seed}", *world.log]))
        raise
