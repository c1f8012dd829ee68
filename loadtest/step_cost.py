"""Measures what a server's step costs: the gap at M concurrent streams, the first token of prompts of n tokens."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import median

from loadtest.client import Client
from loadtest.connection import Clock
from loadtest.errors import BenchError
from loadtest.progress import Progress
from loadtest.prompts import PromptMaker
from loadtest.records import RequestRecord
from loadtest.runner import Bounds, Runner
from loadtest.sessions import Session, Turn
from loadtest.simulate import StepCost

_DECODE_OUTPUT_TOKENS = 96
_REPETITIONS = 5


async def measure_step_cost(
    client: Client,
    maker: PromptMaker,
    clock: Clock,
    progress: Progress,
    batch_sizes: Sequence[int],
    prompt_lengths: Sequence[int],
    context_tokens: int,
    seed: int,
) -> StepCost:
    """Decode cost at each batch size, prefill cost at each prompt length (medians). Streams decode behind prompts of
    `context_tokens`: attention makes a step dearer as they grow, and the model has one cost for all.

    Prompts longer than the server's token budget take several steps and would measure their sum: keep
    `prompt_lengths` within the budget. Raises BenchError if the server fails a request.
    """
    rng = Random(f"cost/{seed}")

    async def play(num: int, prompt_tokens: int, output_tokens: int, users: int) -> list[RequestRecord]:
        turns = [Turn(maker.text(prompt_tokens, rng), prompt_tokens, output_tokens) for _ in range(num)]
        runner = Runner(client, Bounds(), clock)
        await runner.closed([Session(i, "cost", "", 0, (turn,)) for i, turn in enumerate(turns)], users)
        for record in runner.records:
            if not record.served:
                raise BenchError(f"the server failed a request: {record.error} {record.detail}")
        return runner.records

    await play(1, context_tokens, 4, 1)
    decode = []
    for size in batch_sizes:
        progress.note(f"decoding, {size} at once")
        records = await play(size, context_tokens, _DECODE_OUTPUT_TOKENS, size)
        decode.append((size, median(full_batch_gaps(records))))
    prefill = []
    for length in prompt_lengths:
        progress.note(f"prefill, {length} tokens")
        records = await play(_REPETITIONS, length, 1, 1)
        prefill.append((length, median(record.ttft_seconds or 0.0 for record in records)))
    return StepCost(decode=tuple(decode), prefill=tuple(prefill))


def full_batch_gaps(records: Sequence[RequestRecord]) -> list[float]:
    """The gaps while all of the records' streams were decoding. Raises BenchError if they never all were."""
    begin = max(record.token_times[0] for record in records)
    end = min(record.token_times[-1] for record in records)
    gaps = [
        later - earlier
        for record in records
        for earlier, later in zip(record.token_times, record.token_times[1:], strict=False)
        if begin <= earlier and later <= end
    ]
    if not gaps:
        raise BenchError(f"{len(records)} streams never decoded at the same time: is the server's batch smaller?")
    return gaps
