"""An executor without a model: tokens by a published rule, times and failures by a script.

It stands in for the real one in tests of everything above the executor, and behind `octavo serve --executor fake`
for measuring the front end. The rules, for output position p of a sequence:

- `mix`: a hash of (prompt, seed and choice index unless greedy, p, the token before), modulo the vocabulary. The
  token before takes part so that a token lost or doubled on the way shows in all that follow.
- `script`: script[p mod len(script)].
- `echo`: prompt[p mod len(prompt)].

Under a constraint the token is the one that this gives if the grammar allows it, else the allowed token at that place
modulo their number.

Log probabilities are made up but well-formed: the token has rank 1 and logprob −0.5; alternative i has −0.5 − i. An
embedding is the unit vector (1, 0, 0, …).
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from engine.config import EngineConfig, FakeOptions, Fault
from engine.constraints.grammars import GrammarStore
from engine.constraints.matching import Constraints, Matching, Taken
from engine.core.plan import (
    PENDING_TOKEN,
    KVCapacity,
    KVGroupCapacity,
    ScheduledSeq,
    SchedulerOutput,
    SeqId,
    SeqResult,
    StepResult,
    StepTimes,
    TimedSpan,
)
from engine.core.step_cost import StepCost
from engine.executor import Ticket
from engine.types import EngineInfo, GenerationRequest, LoadProgress, TokenLogprobs

_LOAD_STAGES = 4
_MAX_NUM_SEQS = 128  # unless somebody says so


@dataclass(slots=True)
class _Sequence:
    """What the executor remembers of a sequence between steps."""

    record: GenerationRequest
    key: int
    last_token_id: int
    matching: Matching | None
    doom: Fault | None  # strikes when this sequence runs


class FakeExecutor:
    """Follows the Executor protocol; `life` is the number of the engine process, for faults that strike early ones."""

    def __init__(
        self, options: FakeOptions, capacity: KVCapacity, life: int = 1, constraints: Constraints | None = None
    ) -> None:
        """Without `constraints` a sequence that has one fails."""
        self._options = options
        self._constraints = constraints or Constraints(GrammarStore(), options.vocab_size, _MAX_NUM_SEQS)
        self._capacity = capacity
        self._faults = [fault for fault in options.faults if fault.lives is None or life <= fault.lives]
        self._sequences: dict[SeqId, _Sequence] = {}
        self._results: dict[int, tuple[StepResult, float]] = {}  # step id → what, and when it is done
        self._num_steps = 0
        self._free_at = 0.0  # time.monotonic() at which the last submitted step is done

    def capacity(self) -> KVCapacity:
        return self._capacity

    def step_cost(self) -> StepCost | None:
        return None

    def submit(self, output: SchedulerOutput, *, timed: bool = False) -> Ticket:
        self._num_steps += 1
        self.forget(output.forget)
        self._strike(output)
        self._constraints.wait()
        results = tuple([self._run(seq) for seq in output.seqs])
        states = [self._sequences[seq.seq_id] for seq in output.seqs if seq.sample]
        self._constraints.ask([state.matching for state in states if state.matching is not None])
        cost = self._options.step_seconds + self._options.token_seconds * output.num_scheduled_tokens
        begin = max(self._free_at, time.monotonic())
        self._free_at = begin + cost if cost else 0.0
        operations = (TimedSpan("pretend", begin, begin + cost),) if timed else ()
        times = StepTimes(begin, begin + cost, begin + cost, operations)
        self._results[output.step_id] = StepResult(output.step_id, results, times=times), self._free_at
        return Ticket(output.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        result, done_at = self._results.pop(ticket.step_id)
        remaining = done_at - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)
        return result

    def forget(self, seq_ids: Sequence[SeqId]) -> None:
        for seq_id in seq_ids:
            state = self._sequences.pop(seq_id, None)
            if state is not None and state.matching is not None:
                self._constraints.end(state.matching)

    def close(self) -> None:
        self._sequences.clear()
        self._results.clear()
        self._constraints.close()

    def _strike(self, output: SchedulerOutput) -> None:
        """Let the faults happen that concern the step as a whole."""
        for fault in self._faults:
            if fault.step == self._num_steps:
                _fail(fault)
        for seq in output.seqs:
            if seq.record is not None:
                self._sequences[seq.seq_id] = self._remember(seq.record)
            doom = self._sequences[seq.seq_id].doom
            if doom is not None and doom.kind != "error":
                _fail(doom)

    def _remember(self, record: GenerationRequest) -> _Sequence:
        prompt = record.prompt_token_ids
        key = zlib.crc32(array("q", prompt))
        if record.sampling.temperature > 0:
            key = zlib.crc32(array("Q", (record.seed, record.choice_index)), key)
        known = record.output_token_ids or prompt
        doom = next((f for f in self._faults if f.token_id is not None and f.token_id in prompt), None)
        matching = None
        if record.constraint is not None:
            matching = self._constraints.begin(record, record.constraint)
        return _Sequence(record, key, known[-1], matching, doom)

    def _run(self, seq: ScheduledSeq) -> SeqResult:
        state = self._sequences[seq.seq_id]
        record = state.record
        if state.doom is not None:
            return SeqResult(seq.seq_id, error="scripted failure of this sequence")
        sampling = record.sampling
        taken = Taken()
        logprobs: tuple[TokenLogprobs, ...] = ()
        embedding: tuple[float, ...] = ()
        if seq.sample:
            known = seq.token_ids[-1]
            before = state.last_token_id if known == PENDING_TOKEN else known
            token_id = self._token(state, seq.output_position, before)
            taken = Taken((token_id,)) if state.matching is None else self._constrain(state.matching, token_id)
            if taken.error is not None:
                return SeqResult(seq.seq_id, error=taken.error)
            token_id = state.last_token_id = taken.token_ids[-1] if taken.token_ids else before
            if sampling.logprobs is not None:
                logprobs = (self._logprobs(token_id, sampling.logprobs),)
        end = seq.start_position + len(seq.token_ids)
        if record.pooling is not None and end >= len(record.prompt_token_ids):
            embedding = (1.0, *[0.0] * (self._options.hidden_size - 1))
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = self._prompt_logprobs(record, end - seq.num_logits_rows, end, sampling.prompt_logprobs)
        return SeqResult(seq.seq_id, taken.token_ids, logprobs, prompt_logprobs, embedding, finished=taken.finished)

    def _constrain(self, matching: Matching, token_id: int) -> Taken:
        """What a sequence takes instead of a token, if its grammar doesn't allow that."""
        mask = self._constraints.masks[matching.row]
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        if matching.error is not None or not len(allowed):
            return Taken(finished=matching.accepting, error=matching.error)
        if token_id not in allowed:
            token_id = int(allowed[token_id % len(allowed)])
        return matching.take(token_id)

    def _token(self, state: _Sequence, position: int, before: int) -> int:
        if self._options.rule == "mix":
            mixed = (state.key ^ (position * 0x9E3779B1) ^ (before * 0x85EBCA77)) & 0xFFFFFFFF
            mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
            return (mixed ^ (mixed >> 13)) % self._options.vocab_size
        tokens = self._options.script if self._options.rule == "script" else state.record.prompt_token_ids
        return tokens[position % len(tokens)]

    def _logprobs(self, token_id: int, num_alternatives: int) -> TokenLogprobs:
        vocab_size = self._options.vocab_size
        top = tuple([((token_id + i) % vocab_size, -0.5 - i) for i in range(min(num_alternatives, vocab_size))])
        return TokenLogprobs(token_id, -0.5, 1, top)

    def _prompt_logprobs(
        self, record: GenerationRequest, start: int, end: int, num_alternatives: int
    ) -> tuple[TokenLogprobs | None, ...]:
        """The rows of positions start … end − 1 tell about the tokens one position later."""
        prompt = record.prompt_token_ids
        first = (None,) if start == 0 else ()
        return first + tuple([self._logprobs(t, num_alternatives) for t in prompt[start + 1 : end + 1]])


def build_fake_executor(
    config: EngineConfig,
    report: Callable[[LoadProgress], None],
    life: int,
    grammars: GrammarStore | None = None,
) -> tuple[FakeExecutor, EngineInfo]:
    """The fake engine that the configuration asks for. Takes load_seconds. Without `grammars` no request may have a
    constraint."""
    options = config.fake
    for stage in range(_LOAD_STAGES):
        report(LoadProgress("pretending to read weights", stage / _LOAD_STAGES))
        time.sleep(options.load_seconds / _LOAD_STAGES)
    for fault in options.faults:
        if fault.step == 0 and (fault.lives is None or life <= fault.lives):
            _fail(fault)
    block_size = config.block_size
    num_blocks = options.kv_cache_tokens // block_size
    num_kv_tokens = num_blocks * block_size
    info = EngineInfo(
        architecture="fake",
        num_parameters=0,
        vocab_size=options.vocab_size,
        max_model_len=min(config.max_model_len or options.context_length, options.context_length, num_kv_tokens),
        block_size=block_size,
        num_kv_blocks=(num_blocks,),
        kv_capacity_tokens=num_kv_tokens,
        kv_cache_bytes=0,
        kv_bytes_per_token=0,
        weight_bytes=0,
        max_num_batched_tokens=config.max_num_batched_tokens or 512,
        max_num_seqs=config.max_num_seqs,
        device="cpu",
        kernels="fake",
        dtype="none",
        kv_cache_dtype="none",
        quantization="none",
        num_threads=1,
        hidden_size=options.hidden_size,
    )
    num_host_blocks = options.host_kv_cache_tokens // block_size
    group = KVGroupCapacity(num_blocks + 1, num_host_blocks=num_host_blocks + 1 if num_host_blocks else 0)
    capacity = KVCapacity(block_size, (group,))
    constraints = Constraints(
        GrammarStore() if grammars is None else grammars,
        options.vocab_size,
        config.max_num_seqs,
        fast_forward=config.fast_forward,
    )
    return FakeExecutor(options, capacity, life, constraints), info


def _fail(fault: Fault) -> NoReturn:
    if fault.kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind in ("die", "hang"):
        while True:
            time.sleep(3600)
    raise RuntimeError("scripted failure of the step")
