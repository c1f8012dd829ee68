"""An executor that keeps what a KV cache would hold, and a driver that runs a scheduler against it.

A slot holds the *history* of the token written there: a number that depends on the cache namespace and on every token
up to and including it. A sequence that reads through its block tables must find the histories of its own tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.core.plan import (
    PENDING_TOKEN,
    BlockCopy,
    KVCapacity,
    KVGroupCapacity,
    ScheduledSeq,
    SchedulerOutput,
    SeqId,
    SeqResult,
    StepResult,
)
from engine.core.scheduler import Scheduler
from engine.types import FinishReason, GenerationRequest, Pooling, RequestUpdate, TokenLogprobs
from tests.choices import Outcomes, request

Memory = dict[tuple[int, int], int]  # (block, offset) → history

MASK = (1 << 64) - 1
POISON = -1


def capacity(
    num_blocks: int, block_size: int = 16, window: int | None = None, host_blocks: int = 0, copy_cost: int = 0
) -> KVCapacity:
    """One group with num_blocks blocks to hand out, and host_blocks behind them."""
    num_host_blocks = host_blocks + 1 if host_blocks else 0
    return KVCapacity(block_size, (KVGroupCapacity(num_blocks + 1, window, num_host_blocks, copy_cost),))


def history(before: int, token_id: int) -> int:
    return (before * 6364136223846793005 + (token_id + 1) * 1442695040888963407 + 1) & MASK


def histories(namespace: int, token_ids: Iterable[int]) -> list[int]:
    result, last = [], history(0, namespace)
    for token_id in token_ids:
        last = history(last, token_id)
        result.append(last)
    return result


def draw(record: GenerationRequest, last_history: int, output_position: int, vocab_size: int) -> int:
    """The token that follows: from the tokens before it, the seed, the choice and the position, and nothing else."""
    mixed = last_history
    for part in (record.seed, record.choice_index, output_position):
        mixed = history(mixed, part)
    return (mixed >> 33) % vocab_size


def expected_outputs(
    record: GenerationRequest, choice_index: int, max_model_len: int, vocab_size: int
) -> tuple[tuple[int, ...], FinishReason]:
    """What a choice produces when it is alone in the world."""
    solo = request(
        record.request_id,
        record.prompt_token_ids,
        choice_index=choice_index,
        seed=record.seed,
        namespace=record.cache_namespace,
    )
    sampling = record.sampling
    last = histories(record.cache_namespace, record.prompt_token_ids)[-1]
    outputs: list[int] = []
    while len(outputs) < sampling.max_tokens:
        outputs.append(draw(solo, last, len(outputs), vocab_size))
        last = history(last, outputs[-1])
        if outputs[-1] in record.stop_token_ids and len(outputs) > sampling.min_tokens:
            return tuple(outputs), FinishReason.STOP
        if len(record.prompt_token_ids) + len(outputs) >= max_model_len:
            break
    return tuple(outputs), FinishReason.LENGTH


@dataclass
class _State:
    """What the executor knows of a sequence."""

    record: GenerationRequest
    tables: list[list[int]]
    token_ids: list[int]
    histories: list[int]
    num_pooled: int = 0
    failed: bool = False


class ContentExecutor:
    """Runs steps in order at once, and fails the test at the first thing that a real executor would trip over.

    A step that fails a sequence leaves POISON where it wrote, and whoever reads that fails too.
    """

    def __init__(self, kv: KVCapacity, vocab_size: int, max_num_seqs: int) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.memory: list[Memory] = [{} for _ in kv.groups]
        self.host_memory: list[Memory] = [{} for _ in kv.groups]
        self.states: dict[SeqId, _State] = {}
        self.failing: dict[SeqId, str] = {}  # sequences whose next step is an error
        self.num_copies = 0
        self.num_swaps = 0
        self.num_tokens = 0

    def run(self, output: SchedulerOutput) -> StepResult:
        for seq_id in output.forget:
            del self.states[seq_id]
        self._swap(output.swap_out, self.memory, self.host_memory)
        self._swap(output.swap_in, self.host_memory, self.memory)
        self._copy(output)
        return StepResult(output.step_id, tuple([self._run(seq) for seq in output.seqs]))

    def _swap(self, copies: tuple[BlockCopy, ...], source: list[Memory], target: list[Memory]) -> None:
        """Whole blocks: a slot that nobody has written comes out as such."""
        assert len({(copy.group, copy.target) for copy in copies}) == len(copies)
        read = [
            {offset: source[copy.group].get((copy.source, offset)) for offset in range(self.kv.block_size)}
            for copy in copies
        ]
        for copy, block in zip(copies, read, strict=True):
            for offset, content in block.items():
                target[copy.group].pop((copy.target, offset), None)
                if content is not None:
                    target[copy.group][copy.target, offset] = content
        self.num_swaps += len(copies)

    def _copy(self, output: SchedulerOutput) -> None:
        sources = {(copy.group, copy.source) for copy in output.block_copies}
        targets = {(copy.group, copy.target) for copy in output.block_copies}
        assert not sources & targets, f"a block is source and target: {output.block_copies}"
        assert len(targets) == len(output.block_copies)
        for group, source, target in output.block_copies:
            memory = self.memory[group]
            for offset in range(self.kv.block_size):
                if (source, offset) in memory:
                    memory[target, offset] = memory[source, offset]
        self.num_copies += len(output.block_copies)

    def _run(self, seq: ScheduledSeq) -> SeqResult:
        state = self._state_of(seq)
        start, end = seq.start_position, seq.start_position + len(seq.token_ids)
        self.num_tokens += end - start
        assert len(seq.block_tables) == len(self.kv.groups)
        for table, tail in zip(state.tables, seq.block_tables, strict=True):
            assert tail.start <= len(table), f"{seq.seq_id}: a gap in the table"
            table[tail.start :] = tail.block_ids
        for position, token_id in enumerate(seq.token_ids, start):
            assert token_id == PENDING_TOKEN or token_id == state.token_ids[position]
            assert token_id != PENDING_TOKEN or position == end - 1
        state.failed = state.failed or self.failing.pop(seq.seq_id, None) is not None
        if state.failed:
            self._write(seq.seq_id, state, start, end)
            return SeqResult(seq.seq_id, error="scripted")
        assert end <= len(state.token_ids), f"{seq.seq_id} runs a token that nobody has sampled"
        self._write(seq.seq_id, state, start, end)
        if not self._reads_well(seq.seq_id, state, start, end):
            state.failed = True
            return SeqResult(seq.seq_id, error="poisoned")
        return self._result(seq, state, end)

    def _state_of(self, seq: ScheduledSeq) -> _State:
        if seq.record is not None:
            assert seq.seq_id not in self.states, f"{seq.seq_id}: the record travels again"
            assert seq.record.n == 1
            assert seq.seq_id == (seq.record.request_id, seq.record.choice_index)
            assert all(tail.start == 0 for tail in seq.block_tables)
            tokens = [*seq.record.prompt_token_ids, *seq.record.output_token_ids]
            state = _State(
                seq.record, [[] for _ in self.kv.groups], tokens, histories(seq.record.cache_namespace, tokens)
            )
            self.states[seq.seq_id] = state
            assert len(self.states) <= self.max_num_seqs, "no slot left"
        return self.states[seq.seq_id]

    def _write(self, seq_id: SeqId, state: _State, start: int, end: int) -> None:
        size = self.kv.block_size
        for memory, table in zip(self.memory, state.tables, strict=True):
            for position in range(start, end):
                assert table[position // size] != 0, f"{seq_id} writes to the null block"
                written = POISON if state.failed else state.histories[position]
                memory[table[position // size], position % size] = written

    def _reads_well(self, seq_id: SeqId, state: _State, start: int, end: int) -> bool:
        """Whether all that the tokens start … end − 1 can see is their own past; False if some of it is poison."""
        size = self.kv.block_size
        for group, (spec, memory, table) in enumerate(zip(self.kv.groups, self.memory, state.tables, strict=True)):
            first = 0 if spec.window is None else max(0, start - spec.window + 1)
            for position in range(first, end):
                found = memory.get((table[position // size], position % size))
                if found == POISON:
                    return False
                assert found == state.histories[position], (
                    f"{seq_id} reads something else at {position} of group {group}: table {table}"
                )
        return True

    def _result(self, seq: ScheduledSeq, state: _State, end: int) -> SeqResult:
        record, num_prompt = state.record, len(state.record.prompt_token_ids)
        token_ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if seq.sample:
            assert seq.num_logits_rows > 0
            assert end == len(state.token_ids) == num_prompt + seq.output_position
            token_id = draw(record, state.histories[-1], seq.output_position, self.vocab_size)
            state.token_ids.append(token_id)
            state.histories.append(history(state.histories[-1], token_id))
            token_ids = (token_id,)
            if record.sampling.logprobs is not None:
                logprobs = (TokenLogprobs(token_id, -1.0, 1, ()),)
        prompt_logprobs: list[TokenLogprobs | None] = []
        if record.sampling.prompt_logprobs is not None:
            first_row = end - seq.num_logits_rows
            if first_row == 0:
                prompt_logprobs.append(None)
            told = record.prompt_token_ids[first_row + 1 : end + 1]
            prompt_logprobs += [TokenLogprobs(t, -1.0, 1, ()) for t in told]
        embedding: tuple[float, ...] = ()
        if record.pooling is not None:
            state.num_pooled += len(seq.token_ids)
            if end == num_prompt:
                assert record.pooling is Pooling.LAST or state.num_pooled == num_prompt
                embedding = (float(state.histories[-1]),)
        return SeqResult(seq.seq_id, token_ids, logprobs, tuple(prompt_logprobs), embedding)


class Driver:
    """Scheduler and executor, with up to `depth` steps under way; checks all invariants after each operation."""

    def __init__(self, scheduler: Scheduler, executor: ContentExecutor, depth: int) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.under_way: deque[tuple[SchedulerOutput, StepResult]] = deque()
        self.outcomes = Outcomes()
        self.plans: list[list[tuple[int, int]]] = []

    def add(self, *requests: GenerationRequest) -> None:
        for one in requests:
            self.scheduler.add(one)
            self.outcomes.expect(one)
            self.scheduler.check_invariants()

    def abort(self, request_id: int, choice_index: int | None = None) -> list[RequestUpdate]:
        updates = self.scheduler.abort(request_id, choice_index)
        self.outcomes.hear(updates)
        self.scheduler.check_invariants()
        return updates

    def submit(self) -> SchedulerOutput:
        """Plan a step and start it."""
        output = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if output.seqs:
            assert output.num_scheduled_tokens > 0
            self.under_way.append((output, self.executor.run(output)))
        else:
            assert not output.block_copies
            assert not output.forget
            assert self.under_way or not self.scheduler.has_work(), "no progress"
        self.plans.append(plan_of(output))
        return output

    def collect(self) -> list[RequestUpdate]:
        """Finish the oldest step under way."""
        updates = self.scheduler.update(*self.under_way.popleft())
        self.outcomes.hear(updates)
        self.scheduler.check_invariants()
        return updates

    def step(self) -> list[tuple[int, int]]:
        """Plan a step, and finish the oldest if `depth` are under way; the plan as (request id, tokens) pairs."""
        output = self.submit()
        while len(self.under_way) >= self.depth or (self.under_way and not output.seqs):
            self.collect()
        return plan_of(output)

    def run(self, max_steps: int = 10_000) -> list[list[tuple[int, int]]]:
        """Until nothing is left; the plans."""
        begin = len(self.plans)
        while self.scheduler.has_work() or self.under_way:
            assert len(self.plans) - begin < max_steps, "it doesn't come to an end"
            self.step()
        return self.plans[begin:]


def plan_of(output: SchedulerOutput) -> list[tuple[int, int]]:
    """[(request id, tokens)] in the order of the step."""
    return [(seq.seq_id.request_id, len(seq.token_ids)) for seq in output.seqs]


def make_driver(
    kv: KVCapacity,
    *,
    budget: int = 1024,
    max_num_seqs: int = 64,
    max_model_len: int = 8192,
    depth: int = 1,
    vocab_size: int = 1000,
    **options: Any,
) -> Driver:
    scheduler = Scheduler(
        kv,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        **options,
    )
    return Driver(scheduler, ContentExecutor(kv, vocab_size, max_num_seqs), depth)
