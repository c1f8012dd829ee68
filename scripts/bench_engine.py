"""The whole engine, in its own process, with random weights of a model's shapes: no model is needed.

    python scripts/bench_engine.py                                   # a card, 8 B parameters
    python scripts/bench_engine.py --quantization int4               # the same in 4 bits
    python scripts/bench_engine.py --batch-invariant                 # and what that costs
    python scripts/bench_engine.py --shape tiny --device cpu         # does it all work; no figures worth keeping

One stream: tokens a second, and the share of what reading the weights once a token would allow at the card's measured
copy rate. An offline set: all requests at once, prompts and answers of random lengths. Between steps: the share of the
set's time in which no step ran though there was work. Neighbours: the share of tokens that are others alone than in a
batch of 64, greedy and seeded. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.hardware import detect
from engine.types import GenerationRequest, SamplingParams, StepStats
from engine.wire import StepBegun


@dataclass(frozen=True, slots=True)
class Shape:
    """A model in Llama's architecture, and how much is asked of it."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context: int
    shortest: int  # of the offline set's prompts and answers, in tokens
    longest: int
    stream_tokens: int

    def config(self) -> dict[str, Any]:
        """As config.json has it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128256, 8192, 100, 1024, 512),
    "70b": Shape(8192, 28672, 80, 64, 8, 128256, 8192, 100, 1024, 128),
    "tiny": Shape(64, 128, 2, 4, 2, 256, 256, 4, 12, 8),
}


@dataclass
class Report:
    description: str
    weight_bytes: int
    stream_tokens_per_second: float = 0.0
    stream_share_of_bound: float | None = None  # None: the copy rate was not measured
    set_seconds: float = 0.0
    set_output_tokens_per_second: float = 0.0
    set_tokens_per_second: float = 0.0  # prompts and answers
    between_steps_share: float = 0.0
    differing_share: dict[str, float] = field(default_factory=dict)  # "greedy", "seeded"


class Driver:
    """Requests to one engine."""

    def __init__(self, client: EngineClient, shape: Shape) -> None:
        self._client, self._shape = client, shape
        self._random = random.Random(0)

    def request(self, prompt_tokens: int, max_tokens: int, temperature: float = 0.0) -> GenerationRequest:
        prompt = tuple(self._random.randrange(self._shape.vocab_size) for _ in range(prompt_tokens))
        return GenerationRequest(
            self._client.new_request_id(), prompt, SamplingParams(max_tokens, temperature=temperature), seed=7
        )

    def again(self, request: GenerationRequest) -> GenerationRequest:
        """The same prompt, sampling and seed."""
        return GenerationRequest(
            self._client.new_request_id(), request.prompt_token_ids, request.sampling, request.seed
        )

    async def tokens(self, request: GenerationRequest) -> tuple[list[int], list[float]]:
        """What a request produced, and when each update came."""
        tokens: list[int] = []
        times: list[float] = []
        async for updates in self._client.submit(request):
            for update in updates:
                tokens += update.new_token_ids
                times.append(time.perf_counter())
        return tokens, times

    async def stream(self, report: Report, copy_rate: float | None) -> None:
        await self.tokens(self.request(self._shape.shortest, self._shape.stream_tokens))  # sets things up
        tokens, times = await self.tokens(self.request(self._shape.shortest, self._shape.stream_tokens))
        report.stream_tokens_per_second = (len(tokens) - 1) / (times[-1] - times[0])
        if copy_rate is not None:
            table_bytes = (
                2 * self._shape.vocab_size * self._shape.hidden_size
            )  # of the embedding: a token reads one row
            read_bytes = report.weight_bytes - table_bytes
            report.stream_share_of_bound = report.stream_tokens_per_second * read_bytes / copy_rate

    async def offline_set(self, report: Report, num_requests: int) -> None:
        lengths = [
            tuple(self._random.randint(self._shape.shortest, self._shape.longest) for _ in range(2))
            for _ in range(num_requests)
        ]
        requests = [self.request(prompt, answer) for prompt, answer in lengths]
        gaps: list[float] = []

        def note(stats: StepStats, begun: StepBegun) -> None:
            gaps.append(stats.gap_seconds)

        self._client.add_step_listener(note)
        begun_at = time.perf_counter()
        results = await asyncio.gather(*(self.tokens(request) for request in requests))
        report.set_seconds = time.perf_counter() - begun_at
        self._client.remove_step_listener(note)
        produced = sum(len(tokens) for tokens, _ in results)
        report.set_output_tokens_per_second = produced / report.set_seconds
        report.set_tokens_per_second = (produced + sum(prompt for prompt, _ in lengths)) / report.set_seconds
        report.between_steps_share = sum(gaps) / report.set_seconds

    async def neighbours(self, report: Report, count: int) -> None:
        for name, temperature in (("greedy", 0.0), ("seeded", 1.0)):
            requests = [self.request(self._shape.shortest, self._shape.shortest, temperature) for _ in range(count)]
            alone, _ = await self.tokens(requests[0])
            self._client.reset_prefix_cache()
            together = await asyncio.gather(*(self.tokens(self.again(request)) for request in requests))
            differing = sum(a != b for a, b in zip(alone, together[0][0], strict=True))
            report.differing_share[name] = differing / len(alone)


async def measure(config: EngineConfig, shape: Shape, num_requests: int, copy_rate: float | None) -> Report:
    client = EngineClient(config)
    await client.start()
    try:
        info = await client.wait_ready()
        report = Report(f"{info.kernels}, {info.quantization}", info.weight_bytes)
        driver = Driver(client, shape)
        await driver.stream(report, copy_rate)
        await driver.offline_set(report, num_requests)
        await driver.neighbours(report, min(64, num_requests))
    finally:
        await client.close()
    return report


def measure_copy_rate() -> float:
    """Bytes a second of a copy on the card, read and written together; before the engine takes its memory."""
    import torch

    from kernels.triton.bench import Sizes, measure_ceilings

    rate, _ = measure_ceilings(torch.device("cuda"), Sizes(), repeats=20)
    torch.cuda.empty_cache()
    return rate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--requests", type=int, default=256, help="of the offline set")
    options = parser.parse_args()
    if options.device == "cuda" and not detect().has_cuda:
        sys.stderr.write("no NVIDIA GPU here, or the installed torch cannot use it: nothing is measured\n")
        return 1
    shape = SHAPES[options.shape]
    copy_rate = measure_copy_rate() if options.device == "cuda" else None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
        config = EngineConfig(
            folder,
            load_format="dummy",
            device=options.device,
            kernels=options.kernels,
            quantization=options.quantization,
            batch_invariant=options.batch_invariant,
            max_num_seqs=options.requests,
            prefix_caching=False,
        )
        report = asyncio.run(measure(config, shape, options.requests, copy_rate))
    for name, value in asdict(report).items():
        sys.stdout.write(f"{name:30} {value}\n")
    sys.stdout.write(json.dumps(asdict(report)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
