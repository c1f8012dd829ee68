"""A preempted sequence comes back: computed again, or copied to the host's memory and back. Seconds by length.

    python scripts/swap_or_recompute.py MODEL.gguf --kernels native

Both are measured in turn on the same runner, the median of --repetitions; blocks are those of the model's KV cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine.models.loader import load_model, open_model
from engine.runner.model_runner import ModelRunner
from kernels.interface import DType, KVCacheSpec
from kernels.select import select

BLOCK_SIZE = 16
CHUNK_TOKENS = 512


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kernels", default="native", choices=("native", "torch"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 16, 64, 256, 512, 1024, 2048])
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    longest = max(options.lengths)
    kernels = select("cpu", DType.BFLOAT16, options.kernels, options.threads)
    decoder = load_model(open_model(options.model), kernels, max_model_len=longest, max_num_batched_tokens=CHUNK_TOKENS)
    [group] = decoder.kv_groups
    num_blocks = -(-longest // BLOCK_SIZE) + 1
    head_dim = group.head_dim
    spec = KVCacheSpec(
        len(group.layers), num_blocks, BLOCK_SIZE, group.num_kv_heads, head_dim, head_dim, kernels.kv_dtype
    )
    cache, host = kernels.new_kv_cache(spec), kernels.new_host_kv_cache(spec)
    runner = ModelRunner(
        kernels,
        decoder,
        [cache],
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=CHUNK_TOKENS,
        max_num_seqs=1,
        max_model_len=longest,
    )

    def recompute(length: int) -> None:
        """In chunks, as a step takes them; without the attention to earlier chunks, so rather too fast."""
        for start in range(0, length, CHUNK_TOKENS):
            runner.warm_up(min(CHUNK_TOKENS, length - start))

    def swap(length: int) -> None:
        blocks = np.arange(1, -(-length // BLOCK_SIZE) + 1, dtype=np.int32)
        kernels.move_blocks(cache, blocks, host, blocks)
        kernels.move_blocks(host, blocks, cache, blocks)

    print("| tokens | KV, MiB | recompute, ms | swap out and in, ms | recompute ÷ swap |\n|---|---|---|---|---|")  # noqa: T201
    for length in options.lengths:
        for work in (recompute, swap):
            work(length)  # sets things up
        pairs = [
            (seconds(lambda n=length: recompute(n)), seconds(lambda n=length: swap(n)))  # type: ignore[misc]
            for _ in range(options.repetitions)
        ]
        computed, moved = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
        mebibytes = -(-length // BLOCK_SIZE) * kernels.kv_block_bytes(spec) / 2**20
        print(f"| {length:,} | {mebibytes:.2f} | {computed:.2f} | {moved:.2f} | {computed / moved:.0f} |")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
