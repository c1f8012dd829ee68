"""Perplexity of the default model in each form of weights and KV cache, beside transformers in float32.

    python -m tests.quality.perplexity --tokens 50000

The text is Python's own documentation of its language, as every interpreter carries it (`pydoc_data.topics`), in
windows that know nothing of each other. The engine computes each window as a prompt whose logprobs are asked for;
transformers gets the same weights, dequantised. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import pydoc_data.topics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.core.plan import BlockTableTail, ScheduledSeq, SchedulerOutput, SeqId
from engine.executor import Executor
from engine.models.quantization import Quantization
from engine.runner.local_executor import build_executor
from engine.types import GenerationRequest, SamplingParams
from server.model_store import packaged_model_path
from server.text.loading import load_tokenizer

WINDOW = 1024
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Variant:
    """Weights and KV cache in certain bits."""

    name: str
    quantization: Quantization
    int8_kv: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, int8 KV" if self.int8_kv else self.name


@dataclass(frozen=True)
class Score:
    label: str
    perplexity: float
    tokens_per_second: float


WEIGHTS: tuple[tuple[str, Quantization], ...] = (
    ("bfloat16", "none"),
    ("int8", "int8"),
    ("int4, groups of 128", "int4"),
    ("GGUF Q4_1 as it is", "auto"),
)
VARIANTS = tuple(Variant(name, kind, int8_kv) for int8_kv in (False, True) for name, kind in WEIGHTS)


def documentation() -> str:
    """The same text for every call of one interpreter version."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(model: Path, num_tokens: int, window: int = WINDOW) -> list[tuple[int, ...]]:
    """So many tokens of the text, cut into windows."""
    tokens = load_tokenizer(model).tokenizer.encode(documentation(), add_special_tokens=False)[:num_tokens]
    if len(tokens) < num_tokens:
        raise SystemExit(f"the text has {len(tokens)} tokens only")
    return [tuple(tokens[first : first + window]) for first in range(0, num_tokens, window)]


def of_engine(model: Path, variant: Variant, pieces: Sequence[tuple[int, ...]], threads: int, kernels: str) -> Score:
    """Through the executor, a window a step."""
    length = max(map(len, pieces))
    config = EngineConfig(
        str(model),
        quantization=variant.quantization,
        kv_cache_dtype="int8" if variant.int8_kv else "auto",
        kernels=kernels,  # type: ignore[arg-type]
        max_model_len=length,
        max_num_seqs=1,
        max_num_batched_tokens=length,
        kv_cache_memory_bytes=1 << 28,
        num_threads=threads,
    )
    executor, _ = build_executor(config, lambda progress: None)
    begun_at = time.perf_counter()
    loss = sum(_loss(executor, number, piece) for number, piece in enumerate(pieces))
    seconds = time.perf_counter() - begun_at
    executor.close()
    return _score(variant.label, loss, pieces, seconds)


def _loss(executor: Executor, number: int, tokens: tuple[int, ...]) -> float:
    """−Σ log p of all tokens of a window but the first."""
    record = GenerationRequest(number, tokens, SamplingParams(max_tokens=0, prompt_logprobs=0), seed=0)
    blocks = tuple(range(1, 1 + math.ceil(len(tokens) / BLOCK_SIZE)))
    tails = (BlockTableTail(0, blocks),)
    seq = ScheduledSeq(SeqId(number, 0), 0, tokens, tails, len(tokens), False, 0, record)
    [result] = executor.collect(executor.submit(SchedulerOutput(number, (seq,)))).results
    executor.forget([seq.seq_id])
    if result.error is not None:
        raise SystemExit(result.error)
    return -sum(report.logprob for report in result.prompt_logprobs if report is not None)


def of_transformers(model: Path, pieces: Sequence[tuple[int, ...]], threads: int) -> Score:
    """The dequantised weights in float32."""
    import torch

    from tests.runner.oracle import load_default_model

    torch.set_num_threads(threads)
    oracle = load_default_model(model)
    loss, begun_at = 0.0, time.perf_counter()
    with torch.no_grad():
        for piece in pieces:
            ids = torch.tensor([piece])
            logprobs = torch.log_softmax(oracle(ids).logits[0, :-1].double(), dim=-1)
            loss -= float(logprobs.gather(1, ids[0, 1:, None]).sum())
    return _score("transformers, float32", loss, pieces, time.perf_counter() - begun_at)


def _score(label: str, loss: float, pieces: Sequence[tuple[int, ...]], seconds: float) -> Score:
    num_tokens = sum(map(len, pieces))
    return Score(label, math.exp(loss / (num_tokens - len(pieces))), num_tokens / seconds)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.quality.perplexity", description=__doc__)
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="native")
    parser.add_argument("--no-transformers", action="store_true", help="leave the reference out")
    options = parser.parse_args()
    model = packaged_model_path()
    pieces = windows(model, options.tokens)
    digest = hashlib.sha256(documentation().encode()).hexdigest()[:12]
    _say(f"{options.tokens:,} tokens of pydoc_data.topics, Python {sys.version.split()[0]} (SHA-256 {digest}…)")
    scores = [] if options.no_transformers else [of_transformers(model, pieces, options.threads)]
    _say("| weights and KV cache | perplexity | beside the first | tokens/s |\n|---|---|---|---|")
    for variant in (None, *VARIANTS):
        if variant is not None:
            scores.append(of_engine(model, variant, pieces, options.threads, options.kernels))
        if scores:
            last, first = scores[-1], scores[0]
            change = last.perplexity / first.perplexity - 1
            _say(f"| {last.label} | {last.perplexity:.4f} | {change:+.3%} | {last.tokens_per_second:,.0f} |")
    _say(json.dumps([asdict(score) for score in scores]))


if __name__ == "__main__":
    main()
