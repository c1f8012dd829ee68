"""The Triton kernels on a card beside what the card can do: `python -m kernels.bench --device cuda`.

Each case says how many bytes it must move and how many floating-point operations it must do at least; its line shows
both rates and the larger of their shares of the measured ceilings: a copy of a gigabyte, and a large bf16 product of
the library. Weights take turns, so that none stays in the card's cache. The last line is JSON.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch

from kernels import formats
from kernels.bench_parts import BLOCK_SIZE, Case, activations, filled_cache, sampling_of, say
from kernels.interface import Array, AttentionSpec, DType, HostWeight, KernelSet, KVCacheSpec
from kernels.triton.triton_kernels import TritonKernels


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured. The defaults are those of a model of 8 B parameters on a card with 80 GB."""

    copy_bytes: int = 1 << 30
    product: int = 8192
    weight_bytes_between_turns: int = 256 << 20  # before the first comes again: more than the card's cache holds
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    decodes: int = 32
    context: int = 4096
    prompts: int = 4
    prompt_tokens: int = 4096
    weights: tuple[tuple[int, int], ...] = ((4096, 28672), (14336, 4096))  # inputs, outputs
    few_tokens: tuple[int, ...] = (1, 4, 16)
    many_tokens: tuple[int, ...] = (64, 256, 4096)
    rows: int = 64
    vocabulary: int = 128256


@dataclass(frozen=True, slots=True)
class Result:
    case: str
    seconds: float
    bytes_per_second: float
    flops_per_second: float
    of_ceiling: float


def cases(kernels: KernelSet, invariant: KernelSet, sizes: Sizes) -> Iterator[Case]:
    yield from _attention(kernels, sizes)
    yield from _products(kernels, invariant, sizes)
    yield from sampling_of(kernels, sizes.rows, sizes.vocabulary)


def _attention(kernels: KernelSet, sizes: Sizes) -> Iterator[Case]:
    """One layer: decodes deep in their contexts, and whole prompts."""
    for name, count, num_queries, length in (
        ("decode", sizes.decodes, 1, sizes.context),
        ("prefill", sizes.prompts, sizes.prompt_tokens, sizes.prompt_tokens),
    ):
        blocks = length // BLOCK_SIZE
        for kv_dtype in (kernels.kv_dtype, DType.INT8):
            spec = KVCacheSpec(
                1, 1 + count * blocks, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim, sizes.head_dim, kv_dtype
            )
            cache = filled_cache(kernels, spec)
            q, out = (activations(kernels, count * num_queries, sizes.heads, sizes.head_dim) for _ in range(2))
            run = partial(
                kernels.paged_attention,
                q,
                cache,
                0,
                kernels.upload(np.arange(1, 1 + count * blocks, dtype=np.int32).reshape(count, blocks)),
                kernels.upload(np.arange(0, count * num_queries + 1, num_queries, dtype=np.int32)),
                kernels.upload(np.full(count, length, np.int32)),
                AttentionSpec(sizes.head_dim**-0.5),
                out,
            )
            pairs = count * num_queries * (length - (num_queries - 1) / 2)
            yield Case(
                f"attention, {name}, {count} × {length}, KV {kv_dtype}",
                run,
                count * blocks * kernels.kv_block_bytes(spec) if num_queries == 1 else 0.0,
                4.0 * pairs * sizes.heads * sizes.head_dim,
            )


def _products(kernels: KernelSet, invariant: KernelSet, sizes: Sizes) -> Iterator[Case]:
    """Weights in bf16 by the library and by the product that does not depend on the batch; INT4 and INT8 by ours."""
    for inputs, outputs in sizes.weights:
        values = np.random.default_rng(0).standard_normal((outputs, inputs), np.float32) * np.float32(0.02)
        for label, owner, host in (
            ("bf16", kernels, HostWeight("F32", values, outputs, inputs)),
            ("bf16, batch-invariant", invariant, HostWeight("F32", values, outputs, inputs)),
            ("INT4", kernels, formats.quantize(values, "INT4_G128")),
            ("INT4, batch-invariant", invariant, formats.quantize(values, "INT4_G128")),
            ("INT8", kernels, formats.quantize(values, "INT8")),
        ):
            before = owner.weight_bytes()
            packed = [owner.pack_linear([host])]
            weight_bytes = owner.weight_bytes() - before
            packed += [owner.pack_linear([host]) for _ in range(sizes.weight_bytes_between_turns // weight_bytes)]
            for num_tokens in (*sizes.few_tokens, *sizes.many_tokens):
                x, out = activations(owner, num_tokens, inputs), activations(owner, num_tokens, outputs)
                yield Case(
                    f"linear {label}, {inputs}→{outputs}, {num_tokens} tokens",
                    _by_turns(owner, x, itertools.cycle(packed), out),
                    weight_bytes + x.nbytes + out.nbytes,
                    2.0 * num_tokens * inputs * outputs,
                )


def _by_turns(kernels: KernelSet, x: Array, weights: Iterator[Array], out: Array) -> Callable[[], object]:
    return lambda: kernels.linear(x, next(weights), out)


# -- measuring --------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of one call: the median of several, by the device's own clock where it has one."""
    run()
    if device.type != "cuda":
        begun_at = time.perf_counter()
        run()
        return time.perf_counter() - begun_at
    taken: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1000)
    return statistics.median(taken)


def measure_ceilings(device: torch.device, sizes: Sizes, repeats: int) -> tuple[float, float]:
    """Bytes a second of a copy, read and written together, and floating-point operations a second of a product."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = seconds(partial(target.copy_, source), device, repeats)
    a, b = (torch.ones((sizes.product, sizes.product), dtype=torch.bfloat16, device=device) for _ in range(2))
    product = seconds(partial(torch.mm, a, b, out=torch.empty_like(a)), device, repeats)
    return 2 * sizes.copy_bytes / copy, 2.0 * sizes.product**3 / product


def bench(device: torch.device, sizes: Sizes, repeats: int) -> dict[str, object]:
    """Print a line for each case, give all as JSON takes it."""
    kernels, invariant = (
        TritonKernels(str(device), DType.BFLOAT16, 1, batch_invariant=batch_invariant)
        for batch_invariant in (False, True)
    )
    copy_rate, product_rate = measure_ceilings(device, sizes, repeats)
    say(kernels.description)
    say(f"ceilings: copy {copy_rate / 1e9:.0f} GB/s, bf16 product {product_rate / 1e12:.0f} TFLOP/s")
    say(f"{'case':56} {'µs':>10} {'GB/s':>8} {'TFLOP/s':>8} {'of ceiling':>10}")
    results: list[Result] = []
    for case in cases(kernels, invariant, sizes):
        taken = seconds(case.run, device, repeats)
        byte_rate, flop_rate = case.num_bytes / taken, case.num_flops / taken
        share = max(byte_rate / copy_rate, flop_rate / product_rate)
        results.append(Result(case.name, taken, byte_rate, flop_rate, share))
        say(f"{case.name:56} {taken * 1e6:10.1f} {byte_rate / 1e9:8.1f} {flop_rate / 1e12:8.2f} {share:10.1%}")
    return {
        "description": kernels.description,
        "copy_bytes_per_second": copy_rate,
        "product_flops_per_second": product_rate,
        "cases": [asdict(result) for result in results],
    }


def main(repeats: int = 20) -> int:
    """Measure the card, or say that there is none; the exit status."""
    if not torch.cuda.is_available():
        sys.stderr.write("no NVIDIA GPU here, or the installed torch cannot use it: nothing is measured\n")
        return 1
    say(json.dumps(bench(torch.device("cuda"), Sizes(), repeats)))
    return 0
