"""One stream and sixteen on the torch kernels beside transformers' generate: `python -m tests.runner.bench_streams`.

The default model, greedy, the same prompts and number of tokens for all. Rounds alternate between the contestants, so
that a busy machine hits all alike; the best round of each counts. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from engine.models.loader import load_model, open_model
from kernels.interface import DType
from kernels.select import select
from server import model_store
from tests.choices import request
from tests.runner.harness import Harness
from tests.runner.oracle import load_default_model

PROMPT_TOKENS, STREAMS = 64, 16
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def run_streams(harness: Harness, prompts: list[list[int]], num_tokens: int, ids: Iterator[int]) -> None:
    harness.run(*[request(next(ids), prompt, num_tokens) for prompt in prompts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--kernels", default="torch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="processor: the time that one thread runs, where others use the machine too",
    )
    options = parser.parse_args()
    clock = CLOCKS[options.clock]

    path = model_store.packaged_model_path()
    kernels = select("cpu", DType(options.dtype), options.kernels, options.threads)
    decoder = load_model(open_model(path), kernels, max_model_len=2048, max_num_batched_tokens=1024)
    oracle = load_default_model(path, getattr(torch, options.dtype))
    torch.set_num_threads(options.threads)
    prompts = [list(range(100 + i, 100 + i + PROMPT_TOKENS)) for i in range(STREAMS)]

    ids = itertools.count()

    def ours(num_streams: int) -> Callable[[], None]:
        harness = Harness(decoder, kernels, num_blocks=256, budget=1024, prefix_cache=False)
        return partial(run_streams, harness, prompts[:num_streams], options.tokens, ids)

    def transformers() -> None:
        with torch.inference_mode():
            oracle.generate(
                torch.tensor(prompts[:1]),
                attention_mask=torch.ones((1, PROMPT_TOKENS), dtype=torch.int64),
                max_new_tokens=options.tokens,
                min_new_tokens=options.tokens,
                do_sample=False,
                pad_token_id=0,
            )

    contestants = {"one stream": ours(1), "sixteen streams": ours(STREAMS), "transformers": transformers}
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(options.rounds):
        for name, run in contestants.items():
            begun_at = clock()
            run()
            best[name] = min(best[name], clock() - begun_at)
    rates = {name: options.tokens * (STREAMS if name == "sixteen streams" else 1) / best[name] for name in best}
    for name, rate in rates.items():
        sys.stdout.write(f"{name:16} {rate:8.1f} tokens/s\n")
    result = {
        "kernels": kernels.description,
        "dtype": options.dtype,
        "clock": options.clock,
        "tokens_per_second": rates,
        "one_stream_to_transformers": rates["one stream"] / rates["transformers"],
        "sixteen_streams_to_one": rates["sixteen streams"] / rates["one stream"],
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
