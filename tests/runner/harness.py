"""Scheduler, runner and kernels in one process: requests in, tokens out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.constraints.grammars import GrammarStore
from engine.constraints.matching import Constraints
from engine.core.host_tier import PreemptionMode
from engine.core.plan import KVCapacity, KVGroupCapacity, SeqId
from engine.core.queue import QueueFactory, fcfs
from engine.core.scheduler import Scheduler
from engine.models.decoder import Decoder
from engine.runner.model_runner import ModelRunner
from engine.types import GenerationRequest
from kernels.interface import KernelSet, KVCacheSpec
from tests.choices import Outcomes


class Harness:
    """`num_blocks` per KV group, and as `host_blocks` behind them, without the null block."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: KernelSet,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        budget: int = 512,
        max_num_seqs: int = 64,
        max_model_len: int = 8192,
        prefix_cache: bool = True,
        host_blocks: int = 0,
        preemption: PreemptionMode = "auto",
        queue: QueueFactory = fcfs,
        grammars: GrammarStore | None = None,
        fast_forward: bool = True,
    ) -> None:
        specs = [
            KVCacheSpec(
                num_layers=len(group.layers),
                num_blocks=num_blocks + 1,
                block_size=block_size,
                num_kv_heads=group.num_kv_heads,
                head_dim=group.head_dim,
                value_head_dim=group.head_dim,
                dtype=kernels.activation_dtype,
            )
            for group in decoder.kv_groups
        ]
        windows = [group.window for group in decoder.kv_groups]
        num_host_blocks = host_blocks + 1 if host_blocks else 0
        groups = tuple(KVGroupCapacity(num_blocks + 1, window, num_host_blocks) for window in windows)
        capacity = KVCapacity(block_size, groups)
        self.kv_caches = [kernels.new_kv_cache(spec) for spec in specs]
        host_specs = [replace(spec, num_blocks=num_host_blocks) for spec in specs if num_host_blocks]
        self.runner = ModelRunner(
            kernels,
            decoder,
            self.kv_caches,
            host_kv_caches=[kernels.new_host_kv_cache(spec) for spec in host_specs],
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            constraints=Constraints(
                grammars or GrammarStore(), decoder.config.vocab_size, max_num_seqs, fast_forward=fast_forward
            ),
        )
        self.scheduler = Scheduler(
            capacity,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            prefix_cache=prefix_cache,
            preemption=preemption,
            queue=queue,
        )
        self.outcomes = Outcomes()

    def add(self, *requests: GenerationRequest) -> None:
        for one in requests:
            self.outcomes.expect(one)
            self.scheduler.add(one)

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.outcomes.hear(self.scheduler.update(output, self.runner.execute(output)))

    def run(self, *requests: GenerationRequest, before_step: Callable[[int], None] | None = None) -> Outcomes:
        """Add the requests and step until nothing is left; `before_step` gets the number of the step to come."""
        self.add(*requests)
        step = 0
        while self.scheduler.has_work():
            if before_step is not None:
                before_step(step)
            self.step()
            step += 1
        self.scheduler.check_invariants()
        return self.outcomes

    def tokens(self, *requests: GenerationRequest) -> list[list[int]]:
        """The outputs of the requests' first choices."""
        outcomes = self.run(*requests)
        return [outcomes[SeqId(one.request_id, one.choice_index)].token_ids for one in requests]
