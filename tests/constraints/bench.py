"""What constraints cost and what fast-forward gains: `python -m tests.constraints.bench`.

The default model on the native kernels, sixteen streams, no server. Three questions:

- free streams beside constrained ones of the same lengths, every token computed: what masks cost;
- a schema of long names and few choices, with fast-forward and without: what forced tokens save;
- the mask of one token, sequence by sequence, the hop to the thread that computes it and back included.

Rounds alternate between the contestants, so that a busy machine hits all alike; the best round of each counts, and the
same ratio by processor time is told beside it, which others on the machine cannot lengthen. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine.constraints.grammars import GrammarStore
from engine.constraints.matching import Constraints
from engine.core.plan import SeqId
from engine.models.decoder import Decoder, Workspace
from engine.models.loader import load_weights, open_model
from engine.types import GenerationRequest
from kernels.interface import DType
from kernels.select import select
from server import model_store
from server.text.loading import load_tokenizer
from server.text.tokenizer import Tokenizer
from server.text.vocabulary import vocabulary
from tests.choices import request
from tests.constraints.conftest import MAX_BATCHED_TOKENS, MAX_MODEL_LEN, Schema, by_schema
from tests.runner.harness import Harness

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


def best(times: list[Seconds]) -> Seconds:
    return Seconds(*map(min, zip(*times, strict=True)))


@dataclass(frozen=True)
class Runs:
    """Makes a harness for each run: the model is loaded once."""

    new_harness: Callable[[bool], Harness]
    ids: itertools.count[int]

    def time(self, requests: list[GenerationRequest], *, fast_forward: bool = False) -> tuple[Seconds, list[list[int]]]:
        """How long it took, and the outputs."""
        harness = self.new_harness(fast_forward)
        mine = [replace(one, request_id=next(self.ids)) for one in requests]
        begun_at, worked = time.perf_counter(), time.process_time()
        outcomes = harness.run(*mine)
        seconds = Seconds(time.perf_counter() - begun_at, time.process_time() - worked)
        return seconds, [outcomes[SeqId(one.request_id, 0)].token_ids for one in mine]


def prompts(tokenizer: Tokenizer, question: str) -> list[list[int]]:
    return [
        tokenizer.encode(f"<|im_start|>user\n{question} ({k})<|im_end|>\n<|im_start|>assistant\n", False)
        for k in range(STREAMS)
    ]


def measure_cost(runs: Runs, tokenizer: Tokenizer, rounds: int, max_tokens: int) -> dict[str, float]:
    """Free and constrained streams of the same lengths."""
    grammar = by_schema(TEXTS)
    constrained = [
        request(0, prompt, max_tokens, temperature=0.8, seed=k, stop=tokenizer.eos_token_ids, constraint=grammar)
        for k, prompt in enumerate(prompts(tokenizer, "Sum up the history of printing as JSON."))
    ]
    lengths = [len(tokens) for tokens in runs.time(constrained)[1]]
    free = [
        replace(one, constraint=None, stop_token_ids=(), sampling=replace(one.sampling, max_tokens=length))
        for one, length in zip(constrained, lengths, strict=True)
    ]
    times = [(runs.time(free)[0], runs.time(constrained)[0]) for _ in range(rounds)]
    without, with_masks = best([one for one, _ in times]), best([other for _, other in times])
    return {
        "tokens": sum(lengths),
        "free_tokens_per_second": sum(lengths) / without.wall,
        "constrained_tokens_per_second": sum(lengths) / with_masks.wall,
        "constrained_to_free": without.wall / with_masks.wall,
        "constrained_to_free_by_processor_time": without.processor / with_masks.processor,
    }


def measure_fast_forward(runs: Runs, tokenizer: Tokenizer, rounds: int) -> dict[str, float]:
    """The same outputs with and without."""
    grammar = by_schema(BOILERPLATE)
    requests = [
        request(0, prompt, 400, temperature=0.8, seed=k, stop=tokenizer.eos_token_ids, constraint=grammar)
        for k, prompt in enumerate(prompts(tokenizer, "Fill in the form as JSON."))
    ]
    outputs = runs.time(requests)[1]
    if runs.time(requests, fast_forward=True)[1] != outputs:
        raise RuntimeError("fast-forward has changed the outputs")
    times = [(runs.time(requests)[0], runs.time(requests, fast_forward=True)[0]) for _ in range(rounds)]
    off, on = best([one for one, _ in times]), best([other for _, other in times])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200, help="per constrained stream, at most")
    options = parser.parse_args()

    path = model_store.packaged_model_path()
    kernels = select("cpu", DType.BFLOAT16, "native", options.threads)
    files = open_model(path)
    weights = load_weights(files, kernels)
    workspace = Workspace(files.config, kernels, MAX_BATCHED_TOKENS)
    tokenizer = load_tokenizer(path).tokenizer
    grammars = GrammarStore()
    grammars.use(vocabulary(tokenizer, files.config.vocab_size))

    def new_harness(fast_forward: bool) -> Harness:
        decoder = Decoder(files.config, weights, kernels, workspace, MAX_MODEL_LEN)
        return Harness(
            decoder,
            kernels,
            num_blocks=1024,
            budget=MAX_BATCHED_TOKENS,
            prefix_cache=False,
            grammars=grammars,
            fast_forward=fast_forward,
        )

    runs = Runs(new_harness, itertools.count())
    cost = measure_cost(runs, tokenizer, options.rounds, options.tokens)
    gain = measure_fast_forward(runs, tokenizer, options.rounds)
    outputs = {}
    for schema in (TEXTS, BOILERPLATE):
        grammar = by_schema(schema)
        ask = [
            request(0, prompt, options.tokens, temperature=0.8, seed=k, constraint=grammar)
            for k, prompt in enumerate(prompts(tokenizer, "Answer as JSON."))
        ]
        outputs[grammar] = runs.time(ask)[1]
    result = {
        "kernels": kernels.description,
        "threads": options.threads,
        "cost": cost,
        "fast_forward": gain,
        "mask_microseconds": measure_masks(grammars, tokenizer, outputs),
    }
    for part in ("cost", "fast_forward", "mask_microseconds"):
        sys.stdout.write(f"{part}\n" + "".join(f"  {k:42} {v:10.3f}\n" for k, v in result[part].items()))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
