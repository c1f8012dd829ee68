"""What constraints cost and what fast-forward gains: `python -m tests.constraints.bench`.

The default model on the native kernels, sixteen streams straight from the engine process, no HTTP. Three questions:

- free streams beside constrained ones of the same lengths, every token computed: what masks cost;
- a schema of long names and few choices, with fast-forward and without: what forced tokens save;
- the mask of one token, sequence by sequence, the hop to the thread that computes it and back included.

Rounds alternate between the contestants, so that a busy machine hits all alike; the median round of each counts, and
the same ratio by the engine's processor time is told beside it, which others cannot lengthen. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import psutil

from engine.client import EngineClient, RequestStream
from engine.config import EngineConfig
from engine.constraints.grammars import GrammarStore
from engine.constraints.matching import Constraints
from engine.constraints.vocabulary import Vocabulary
from engine.types import GenerationRequest
from server import model_store
from server.text.loading import load_tokenizer
from server.text.tokenizer import Tokenizer
from server.text.vocabulary import vocabulary
from tests.choices import request
from tests.constraints.conftest import Schema, by_schema

STREAMS = 16
TEXT: Schema = {"type": "string", "minLength": 40, "maxLength": 160}


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXTS = _object(
    summary=TEXT,
    points={"type": "array", "items": _object(topic=TEXT, weight={"type": "number"}), "minItems": 2, "maxItems": 3},
    sentiment={"enum": ["positive", "neutral", "negative"]},
)
BOILERPLATE = _object(
    **{
        f"{part}_{name}": {"enum": ["not applicable", "requires further information", "approved without reservation"]}
        for part in ("applicant", "organisation", "representative")
        for name in ("identification_document", "registration_certificate", "financial_statement")
    }
)


class Seconds(NamedTuple):
    wall: float
    processor: float  # of all threads


def usual(times: list[Seconds]) -> Seconds:
    return Seconds(*map(median, zip(*times, strict=True)))


class Runs:
    """An engine without fast-forward and one with it, to time requests on."""

    def __init__(self, without: EngineClient, with_it: EngineClient) -> None:
        self._clients = without, with_it

    async def time(
        self, requests: list[GenerationRequest], *, fast_forward: bool = False
    ) -> tuple[Seconds, list[list[int]]]:
        """How long it took, and the outputs."""
        client = self._clients[fast_forward]
        process = psutil.Process(client.engine_pid)
        begun_at, worked = time.perf_counter(), _worked(process)
        streams = [client.submit(replace(one, request_id=client.new_request_id())) for one in requests]
        outputs = await asyncio.gather(*map(_outputs, streams))
        return Seconds(time.perf_counter() - begun_at, _worked(process) - worked), outputs


def _worked(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _outputs(stream: RequestStream) -> list[int]:
    tokens: list[int] = []
    async for updates in stream:
        for update in updates:
            if update.error is not None:
                raise RuntimeError(update.error)
            tokens += update.new_token_ids
    return tokens


async def start(path: Path, words: Vocabulary, threads: int, *, fast_forward: bool) -> EngineClient:
    client = EngineClient(
        EngineConfig(
            str(path),
            kernels="native",
            num_threads=threads,
            max_model_len=2048,
            kv_cache_memory_bytes=1 << 29,
            prefix_caching=False,
            fast_forward=fast_forward,
        )
    )
    await client.start()
    await client.wait_ready()
    client.use_vocabulary(words)
    return client


def prompts(tokenizer: Tokenizer, question: str) -> list[list[int]]:
    return [
        tokenizer.encode(f"<|im_start|>user\n{question} ({k})<|im_end|>\n<|im_start|>assistant\n", False)
        for k in range(STREAMS)
    ]


async def measure_cost(runs: Runs, tokenizer: Tokenizer, rounds: int, max_tokens: int) -> dict[str, float]:
    """Free and constrained streams of the same lengths."""
    grammar = by_schema(TEXTS)
    constrained = [
        request(0, prompt, max_tokens, temperature=0.8, seed=k, stop=tokenizer.eos_token_ids, constraint=grammar)
        for k, prompt in enumerate(prompts(tokenizer, "Sum up the history of printing as JSON."))
    ]
    lengths = [len(tokens) for tokens in (await runs.time(constrained))[1]]
    free = [
        replace(one, constraint=None, stop_token_ids=(), sampling=replace(one.sampling, max_tokens=length))
        for one, length in zip(constrained, lengths, strict=True)
    ]
    times = [((await runs.time(free))[0], (await runs.time(constrained))[0]) for _ in range(rounds)]
    without, with_masks = usual([one for one, _ in times]), usual([other for _, other in times])
    return {
        "tokens": sum(lengths),
        "free_tokens_per_second": sum(lengths) / without.wall,
        "constrained_tokens_per_second": sum(lengths) / with_masks.wall,
        "constrained_to_free": without.wall / with_masks.wall,
        "constrained_to_free_by_processor_time": without.processor / with_masks.processor,
    }


async def measure_fast_forward(runs: Runs, tokenizer: Tokenizer, rounds: int) -> dict[str, float]:
    """The same outputs with and without."""
    grammar = by_schema(BOILERPLATE)
    requests = [
        request(0, prompt, 400, temperature=0.8, seed=k, stop=tokenizer.eos_token_ids, constraint=grammar)
        for k, prompt in enumerate(prompts(tokenizer, "Fill in the form as JSON."))
    ]
    outputs = (await runs.time(requests))[1]
    if (await runs.time(requests, fast_forward=True))[1] != outputs:
        raise RuntimeError("fast-forward has changed the outputs")
    times = [((await runs.time(requests))[0], (await runs.time(requests, fast_forward=True))[0]) for _ in range(rounds)]
    off, on = usual([one for one, _ in times]), usual([other for _, other in times])
    num_tokens = sum(map(len, outputs))
    return {
        "tokens": num_tokens,
        "one_by_one_tokens_per_second": num_tokens / off.wall,
        "fast_forward_tokens_per_second": num_tokens / on.wall,
        "gain": off.wall / on.wall,
        "gain_by_processor_time": off.processor / on.processor,
    }


def measure_masks(
    grammars: GrammarStore, tokenizer: Tokenizer, outputs: dict[str, list[list[int]]]
) -> dict[str, float]:
    """Microseconds from the call that asks for a mask to the one that has it, masks of forced tokens left out; and the
    processor's time of the same."""
    constraints = Constraints(grammars, tokenizer.vocab_size, 1)
    times = []
    for grammar, sequences in outputs.items():
        for token_ids in sequences:
            matching = constraints.begin(request(0, (1,), len(token_ids) + 1, constraint=grammar, logprobs=0), grammar)
            constraints.wait()
            for token_id in token_ids[:-1]:
                matching.take(token_id)
                if not matching.needs_mask:
                    continue
                begun_at, worked = time.perf_counter(), time.process_time()
                constraints.ask([matching])
                constraints.wait()
                times.append((time.perf_counter() - begun_at, time.process_time() - worked))
            constraints.end(matching)
    figures: dict[str, float] = {"masks": len(times)}
    for name, column in zip(("wall", "processor"), zip(*times, strict=True), strict=True):
        for share in (50, 99, 100):
            figures[f"{name}_p{share}"] = float(np.percentile(column, share)) * 1e6
    return figures


async def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    path = model_store.packaged_model_path()
    tokenizer = load_tokenizer(path).tokenizer
    words = vocabulary(tokenizer, tokenizer.vocab_size)
    without, with_it = [await start(path, words, options.threads, fast_forward=on) for on in (False, True)]
    runs = Runs(without, with_it)
    try:
        cost = await measure_cost(runs, tokenizer, options.rounds, options.tokens)
        gain = await measure_fast_forward(runs, tokenizer, options.rounds)
        outputs = {}
        for schema in (TEXTS, BOILERPLATE):
            grammar = by_schema(schema)
            ask = [
                request(0, prompt, options.tokens, temperature=0.8, seed=k, constraint=grammar)
                for k, prompt in enumerate(prompts(tokenizer, "Answer as JSON."))
            ]
            outputs[grammar] = (await runs.time(ask))[1]
    finally:
        await without.close()
        await with_it.close()
    grammars = GrammarStore()
    grammars.use(words)
    return {"cost": cost, "fast_forward": gain, "mask_microseconds": measure_masks(grammars, tokenizer, outputs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=100, help="per constrained stream, at most")
    result = asyncio.run(measure(parser.parse_args()))
    for part, figures in result.items():
        sys.stdout.write(f"{part}\n" + "".join(f"  {name:42} {value:10.3f}\n" for name, value in figures.items()))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
