"""Every implementation on the same cases, beside what the machine can do: `python -m kernels.bench`.

Each case says how many bytes it must move and how many floating-point operations it must do at least. Its line shows
both rates and the larger of their shares of the measured ceilings: the rate at which memory is read, and that of a
large matrix product in the same type. Weights and caches take turns, so that no case runs from a cache that a model
would not fit into. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np

from kernels.bench_parts import BLOCK_SIZE, Case, activations, filled_cache, random_weight, sampling_of, say
from kernels.interface import (
    Activation,
    Array,
    AttentionSpec,
    DType,
    KernelSet,
    KVCacheSpec,
    RopeSpec,
)
from kernels.select import select

_REPEATS = 5
_SECONDS_A_REPEAT = 0.05
_BYTES_BETWEEN_TURNS = 1 << 28  # of weights or KV, before the first comes again


@dataclass(frozen=True)
class Ceilings:
    """What this machine does at best with so many threads."""

    read_bytes_per_second: float
    copy_bytes_per_second: float  # read and written together
    flops_per_second: float  # of a large product in the compute type


def seconds(run: Callable[[], object]) -> float:
    """Of one call: the best of several repeats, each long enough to be measured."""
    run()
    begun_at = time.perf_counter()
    run()
    calls = max(1, int(_SECONDS_A_REPEAT / max(1e-7, time.perf_counter() - begun_at)))
    best = float("inf")
    for _ in range(_REPEATS):
        begun_at = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - begun_at) / calls)
    return best


def measure_ceilings(kernels: KernelSet, num_threads: int) -> Ceilings:
    """Memory by numpy on all threads, each on its own part; the product by torch, or by the kernels where it is not
    installed."""
    parts = [np.ones(_BYTES_BETWEEN_TURNS // 8 // num_threads) for _ in range(num_threads)]
    targets = [np.empty_like(part) for part in parts]
    total = sum(part.nbytes for part in parts)
    with ThreadPoolExecutor(num_threads) as pool:
        read = seconds(lambda: list(pool.map(np.max, parts)))
        copy = seconds(lambda: list(pool.map(np.copyto, targets, parts)))
    size = 1024
    product = seconds(_library_product(kernels, size))
    return Ceilings(total / read, 2 * total / copy, 2 * size**3 / product)


def _library_product(kernels: KernelSet, size: int) -> Callable[[], object]:
    try:
        import torch
    except ImportError:
        x, out = kernels.empty((size, size), kernels.activation_dtype), kernels.empty((size, size), DType.FLOAT32)
        weight = kernels.pack_linear([random_weight("F32", size, size)])
        return lambda: kernels.linear(x, weight, out)
    dtype = torch.float32 if kernels.activation_dtype is DType.FLOAT32 else torch.bfloat16
    a, b, c = (torch.ones((size, size), dtype=dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=c)


# -- cases ----------------------------------------------------------------------------------------------------------


def linear_cases(kernels: KernelSet) -> Iterator[Case]:
    """The products of a small and a large model's layers, and an output head; 1, 16 and 256 tokens."""
    for rows, columns in ((3072, 576), (4096, 4096), (49152, 576)):
        for format in ("F32", "BF16", "Q8_0", "Q4_1"):
            weight, before = random_weight(format, rows, columns), kernels.weight_bytes()
            packed = [kernels.pack_linear([weight])]
            weight_bytes = kernels.weight_bytes() - before
            copies = min(40, _BYTES_BETWEEN_TURNS // weight_bytes)
            packed += [kernels.pack_linear([weight]) for _ in range(copies)]
            for num_tokens in (1, 16) if rows == 49152 else (1, 16, 256):
                x, out = activations(kernels, num_tokens, columns), activations(kernels, num_tokens, rows)
                turn = cycle(packed)

                def run(x: Array = x, out: Array = out, turn: Iterator[Array] = turn) -> None:
                    kernels.linear(x, next(turn), out)

                name = f"linear {format} {columns}→{rows}, {num_tokens} tokens"
                yield Case(name, run, weight_bytes, 2.0 * num_tokens * rows * columns)


def attention_cases(kernels: KernelSet) -> Iterator[Case]:
    """Equal sequences, so many queries of so many keys: decodes of one and of many, a prompt, a chunk far in."""
    heads, kv_heads, head_dim, layers = 9, 3, 64, 4
    spec = AttentionSpec(head_dim**-0.5)
    for count, num_queries, length in ((1, 1, 2048), (16, 1, 1024), (64, 1, 512), (1, 512, 512), (1, 128, 2048)):
        blocks = length // BLOCK_SIZE
        kv = KVCacheSpec(layers, 1 + count * blocks, BLOCK_SIZE, kv_heads, head_dim, head_dim, kernels.activation_dtype)
        cache = filled_cache(kernels, kv)
        tables = kernels.upload(np.arange(1, 1 + count * blocks, dtype=np.int32).reshape(count, blocks))
        starts = kernels.upload(np.arange(0, count * num_queries + 1, num_queries, dtype=np.int32))
        lengths = kernels.upload(np.full(count, length, np.int32))
        q, out = (activations(kernels, count * num_queries, heads, head_dim) for _ in range(2))
        name = f"attention × {layers}, {count} × {num_queries} of {length}"

        def forward(
            q: Array = q,
            out: Array = out,
            kv: Array = cache,
            tables: Array = tables,
            starts: Array = starts,
            lengths: Array = lengths,
        ) -> None:
            for layer in range(layers):
                kernels.paged_attention(q, kv, layer, tables, starts, lengths, spec, out)

        pairs = count * num_queries * (length - (num_queries - 1) / 2)
        yield Case(
            name,
            partial(kernels.run, (name, num_queries), forward),
            count * blocks * kernels.kv_block_bytes(kv),
            4.0 * layers * pairs * heads * head_dim,
        )


def token_cases(kernels: KernelSet) -> Iterator[Case]:
    """What is done to each token alone, for 1 and for 256 tokens of the small model."""
    heads, kv_heads, head_dim = 9, 3, 64
    hidden, inner = heads * head_dim, 1536
    value_bytes = 4 if kernels.activation_dtype is DType.FLOAT32 else 2
    weight = kernels.pack_vector(np.ones(hidden, np.float32))
    table = kernels.upload(np.zeros((2048, head_dim), np.float32))
    spec = KVCacheSpec(1, 17, BLOCK_SIZE, kv_heads, head_dim, head_dim, kernels.activation_dtype)
    cache = kernels.new_kv_cache(spec)
    for n in (1, 256):
        x, residual, out = (activations(kernels, n, hidden) for _ in range(3))
        gate_up, activated = activations(kernels, n, 2 * inner), activations(kernels, n, inner)
        q, k, v = (activations(kernels, n, count, head_dim) for count in (heads, kv_heads, kv_heads))
        gate = kernels.upload(np.full((n, 1), -20.0, np.float32))  # all but shut: x stays finite however often it runs
        positions, slots = kernels.upload(np.arange(n, dtype=np.int32)), kernels.upload(np.arange(16, 16 + n))

        rope = partial(kernels.rope_and_store_kv, q, k, v, positions, table, RopeSpec(head_dim), cache, 0, slots)
        yield Case(
            f"rms_norm with residual, {n} tokens",
            partial(kernels.rms_norm, x, weight, 1e-5, out, residual),
            4 * n * hidden * value_bytes,
        )
        yield Case(
            f"gated_activation, {n} tokens",
            partial(kernels.gated_activation, gate_up, Activation.SILU, activated),
            3 * n * inner * value_bytes,
        )
        yield Case(
            f"add_gated, {n} tokens", partial(kernels.add_gated, x, residual, gate), (3 * hidden * value_bytes + 4) * n
        )
        yield Case(f"rope_and_store_kv, {n} tokens", rope, 2 * n * (hidden + 2 * kv_heads * head_dim) * value_bytes)


def sampling_cases(kernels: KernelSet) -> Iterator[Case]:
    """A batch of 16 rows of a 49,152-token vocabulary."""
    return sampling_of(kernels, 16, 49152)


CASES = {"linear": linear_cases, "attention": attention_cases, "tokens": token_cases, "sampling": sampling_cases}


# -- report ---------------------------------------------------------------------------------------------------------


def bench(kernels: KernelSet, num_threads: int, groups: list[str]) -> dict[str, object]:
    """Run the groups of CASES, print a line for each case, give all as JSON takes it."""
    ceilings = measure_ceilings(kernels, num_threads)
    say(f"\n{kernels.description}, {kernels.activation_dtype}")
    say(
        f"ceilings: read {ceilings.read_bytes_per_second / 1e9:.1f} GB/s, copy "
        f"{ceilings.copy_bytes_per_second / 1e9:.1f} GB/s, product {ceilings.flops_per_second / 1e9:.0f} GFLOP/s"
    )
    say(f"{'case':44} {'µs':>10} {'GB/s':>8} {'GFLOP/s':>9} {'of ceiling':>10}")
    results = []
    for group in groups:
        for case in CASES[group](kernels):
            taken = seconds(case.run)
            byte_rate, flop_rate = case.num_bytes / taken, case.num_flops / taken
            share = max(byte_rate / ceilings.read_bytes_per_second, flop_rate / ceilings.flops_per_second)
            say(f"{case.name:44} {taken * 1e6:10.1f} {byte_rate / 1e9:8.2f} {flop_rate / 1e9:9.1f} {share:10.1%}")
            results.append(
                {
                    "case": case.name,
                    "seconds": taken,
                    "bytes_per_second": byte_rate,
                    "flops_per_second": flop_rate,
                    "of_ceiling": share,
                }
            )
    return {
        "kernels": kernels.name,
        "description": kernels.description,
        "dtype": kernels.activation_dtype.value,
        "threads": num_threads,
        "ceilings": vars(ceilings),
        "cases": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="kernels.bench", description=__doc__)
    parser.add_argument("--kernels", default="torch,native", help="names, with commas; those not here are left out")
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16, or both with a comma")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: the Triton kernels on a card")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="groups of cases")
    options = parser.parse_args()
    if options.device == "cuda":
        from kernels.triton.bench import main as bench_card  # loads torch and triton

        sys.exit(bench_card())
    reports = []
    for dtype in options.dtype.split(","):
        for name in options.kernels.split(","):
            try:
                kernels = select(options.device, DType(dtype), name, options.threads)
            except ValueError as error:
                say(f"\n{name}: {error}")
                continue
            reports.append(bench(kernels, options.threads, options.only))
            kernels.close()
    say(json.dumps(reports))


if __name__ == "__main__":
    main()
