"""The queue policies on one mixed workload, step by step in virtual time: a table, and a plot beside it.

    python scripts/compare_policies.py --output docs/images/policies.png

The scheduler is the real one; an executor without a model gives the tokens, and a step costs what --step-ms and
--token-ms say, so the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine.config import FakeOptions
from engine.core.plan import KVCapacity, KVGroupCapacity
from engine.core.queue_policies import queue_factories
from engine.core.scheduler import Scheduler
from engine.fake_executor import FakeExecutor
from engine.types import GenerationRequest, SamplingParams

POLICIES = ("fcfs", "sjf", "priority", "fair", "lpm")
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Kind:
    """One class of requests. Lengths are uniform, in tokens."""

    name: str
    share: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    priority: int
    tenant: int
    shared: int = 0  # tokens in front that all of the class have in common


KINDS = (
    Kind("chat", 0.6, (20, 80), (10, 60), priority=0, tenant=1),
    Kind("agent", 0.25, (20, 60), (20, 80), priority=0, tenant=2, shared=512),
    Kind("batch", 0.15, (400, 1200), (200, 400), priority=5, tenant=3),
)


@dataclass(frozen=True)
class Arrival:
    at: float  # seconds
    kind: Kind
    request: GenerationRequest


@dataclass(frozen=True)
class Done:
    """One request: how long it took, and how many steps it waited for its first."""

    kind: str
    seconds: float
    steps_waited: int


def arrivals(count: int, rate: float, seed: int) -> list[Arrival]:
    """Poisson arrivals, the same for every policy."""
    rng = random.Random(seed)
    at, made = 0.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        [kind] = rng.choices(KINDS, [kind.share for kind in KINDS])
        own = [rng.randrange(1000, 40000) for _ in range(rng.randint(*kind.prompt))]
        sampling = SamplingParams(max_tokens=rng.randint(*kind.output), temperature=0.0)
        prompt = (*range(kind.shared), *own)
        request = GenerationRequest(number, prompt, sampling, 0, tenant=kind.tenant, priority=kind.priority)
        made.append(Arrival(at, kind, request))
    return made


def run(policy: str, work: Sequence[Arrival], options: argparse.Namespace) -> list[Done]:
    capacity = KVCapacity(BLOCK_SIZE, (KVGroupCapacity(options.kv_tokens // BLOCK_SIZE + 1),))
    executor = FakeExecutor(FakeOptions(), capacity)
    scheduler = Scheduler(
        capacity,
        max_num_batched_tokens=options.budget,
        max_num_seqs=options.max_num_seqs,
        max_model_len=4096,
        queue=queue_factories(options.max_queue_wait_steps)[policy],
    )
    by_id = {arrival.request.request_id: arrival for arrival in work}
    came_at_step: dict[int, int] = {}
    began_at_step: dict[int, int] = {}
    done: list[Done] = []
    now, step, next_one = 0.0, 0, 0
    while len(done) < len(work):
        if not scheduler.has_work():
            now = max(now, work[next_one].at)
        while next_one < len(work) and work[next_one].at <= now:
            scheduler.add(work[next_one].request)
            came_at_step[work[next_one].request.request_id] = step
            next_one += 1
        output = scheduler.schedule()
        step += 1
        for seq in output.seqs:
            began_at_step.setdefault(seq.seq_id.request_id, step)
        now += (options.step_ms + options.token_ms * output.num_scheduled_tokens) / 1000
        for update in scheduler.update(output, executor.collect(executor.submit(output))):
            if update.finish_reason is not None:
                number = update.request_id
                waited = began_at_step[number] - came_at_step[number]
                done.append(Done(by_id[number].kind.name, now - by_id[number].at, waited))
    return done


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(len(values) * share) - 1]


def table(results: dict[str, list[Done]]) -> str:
    """Markdown: a line a policy and class."""
    lines = [
        "| policy | class | requests | mean s | p50 s | p99 s | longest wait, steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for policy, done in results.items():
        for name in ("all", *[kind.name for kind in KINDS]):
            rows = [row for row in done if name in ("all", row.kind)]
            seconds = [row.seconds for row in rows]
            figures = (statistics.mean(seconds), percentile(seconds, 0.5), percentile(seconds, 0.99))
            longest = max(row.steps_waited for row in rows)
            shown = " | ".join(f"{figure:.2f}" for figure in figures)
            lines.append(f"| {policy} | {name} | {len(rows)} | {shown} | {longest} |")
    return "\n".join(lines)


def plot(results: dict[str, list[Done]], path: Path) -> None:
    """Completion times by class and policy, as cumulative shares."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(KINDS), figsize=(11, 3.2), sharey=True, layout="constrained")
    for kind, panel in zip(KINDS, axes, strict=True):
        for policy, done in results.items():
            seconds = sorted(row.seconds for row in done if row.kind == kind.name)
            panel.plot(seconds, [100 * (i + 1) / len(seconds) for i in range(len(seconds))], label=policy)
        panel.set(title=kind.name, xlabel="completion, s", xscale="log")
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("% of requests")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=2.4, help="requests a second (default 2.4)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of each step (default 10)")
    parser.add_argument("--token-ms", type=float, default=1.5, help="more for each token in it (default 1.5)")
    parser.add_argument("--budget", type=int, default=256, help="tokens of a step (default 256)")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--kv-tokens", type=int, default=16384)
    parser.add_argument("--max-queue-wait-steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, help="a PNG")
    options = parser.parse_args()
    work = arrivals(options.requests, options.rate, options.seed)
    results = {policy: run(policy, work, options) for policy in POLICIES}
    assert all(Counter(row.kind for row in done) == Counter(a.kind.name for a in work) for done in results.values())
    print(table(results))  # noqa: T201
    if options.output is not None:
        plot(results, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
