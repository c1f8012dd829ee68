"""Every metric of Octavo's own as plain data: name, kind, labels, buckets, meaning.

The registry is built from it, and so are the tables in docs/metrics.md (`python -m monitoring.catalogue` prints them).
Names are without the prefix `octavo_`, which all of them have; counters get `_total`. Labels only take values from
bounded sets: route templates, methods, status codes, reasons, states, numbers of groups and devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "octavo_"
Kind = Literal["counter", "gauge", "histogram"]

_LATENCY_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5),
    *(10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_ROUTE_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_STEP_SECONDS = (
    *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7.5e-3),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_BATCH_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_BATCH_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As dashboards write it; a histogram's without _bucket, _sum and _count."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


def _seconds(name: str, text: str, labels: tuple[str, ...] = ()) -> Spec:
    return Spec(name, "histogram", text, labels, _LATENCY_SECONDS)


SECTIONS: tuple[tuple[str, tuple[Spec, ...]], ...] = (
    (
        "HTTP",
        (
            Spec("http_requests", "counter", "HTTP requests answered.", ("method", "route", "code")),
            Spec(
                "http_request_duration_seconds",
                "histogram",
                "From the request's arrival to the last byte of its answer, by route template.",
                ("route",),
                _ROUTE_SECONDS,
            ),
            Spec("refusals", "counter", "Requests refused before the engine worked on them.", ("reason",)),
            _seconds("event_loop_lag_seconds", "How late the server's event loop was, sampled ten times a second."),
            Spec("ready", "gauge", "1 when requests can be served, as /ready says."),
        ),
    ),
    (
        "Requests",
        (
            _seconds("time_to_first_token_seconds", "From the request's arrival to its first token."),
            _seconds("inter_token_seconds", "Between one token of a choice and the next."),
            _seconds("request_duration_seconds", "From the request's arrival to its last token."),
            _seconds("request_tokenize_seconds", "From the request's arrival until its tokens are known."),
            _seconds("request_queue_seconds", "From submission to the engine until a step first runs some of it."),
            _seconds("request_prefill_seconds", "From the begin of that step to the first token."),
            _seconds("request_decode_seconds", "From the first token to the last."),
            Spec("request_prompt_tokens", "histogram", "Length of prompts.", (), _TOKENS),
            Spec("request_generation_tokens", "histogram", "Length of answers.", (), _TOKENS),
            Spec("prompt_tokens", "counter", "Tokens of prompts taken in."),
            Spec("cached_prompt_tokens", "counter", "Of these, tokens that the prefix cache had."),
            Spec("generation_tokens", "counter", "Tokens delivered in answers: what clients have got, to the token."),
            Spec(
                "discarded_tokens",
                "counter",
                "Tokens that arrived and were not delivered: behind a stop string, or when the client had gone.",
            ),
            Spec("requests_finished", "counter", "Choices that ended, by reason.", ("reason",)),
            Spec("aborts", "counter", "Choices that ended before their time, by cause.", ("cause",)),
            Spec("slow_requests", "counter", "Requests that took longer than --slow-request-seconds."),
        ),
    ),
    (
        "Engine",
        (
            Spec("requests_running", "gauge", "Sequences being computed."),
            Spec("requests_waiting", "gauge", "Sequences waiting for their turn."),
            Spec("requests_swapped", "gauge", "Of these, preempted sequences whose KV waits in the host's memory."),
            Spec("oldest_waiting_seconds", "gauge", "Age of the oldest request that has not run yet."),
            Spec("oldest_waiting_steps", "gauge", "Steps that the head of the queue has waited."),
            Spec("engine_steps", "counter", "Steps."),
            Spec(
                "step_phase_seconds",
                "histogram",
                "Parts of a step: schedule, prepare its inputs, forward (the model), sample (output head, draw), "
                "update, publish, and the gap before it while there was work.",
                ("phase",),
                _STEP_SECONDS,
            ),
            Spec(
                "sampled_kernel_seconds",
                "counter",
                "Forward passes by kernel, of one step in 64: shares of the time, not the whole of it.",
                ("kernel",),
            ),
            Spec("step_sequences", "histogram", "Sequences in a step.", (), _BATCH_SEQUENCES),
            Spec("step_tokens", "histogram", "Tokens in a step.", (), _BATCH_TOKENS),
            Spec("step_prefill_tokens", "gauge", "Prompt tokens in the latest step."),
            Spec("step_decode_tokens", "gauge", "Answer tokens in the latest step."),
            Spec("computed_tokens", "counter", "Tokens run through the model, prefill and decode.", ("kind",)),
            Spec("preemptions", "counter", "Times a running sequence gave up its KV, by what became of it.", ("kind",)),
            Spec("preempted_tokens", "counter", "Computed tokens given up by preemptions."),
            Spec("overrun_tokens", "counter", "Tokens sampled for choices that had ended; nobody got them."),
            Spec(
                "expert_tokens",
                "counter",
                "Tokens that each expert of a mixture took, all layers together; those from 256 on are one series.",
                ("expert",),
            ),
            Spec("max_step_sequences", "gauge", "Most sequences that a step can hold."),
            Spec("max_step_tokens", "gauge", "Most tokens that a step can hold."),
            Spec("engine_restarts", "counter", "Engine processes that died or hung and were replaced."),
            Spec("replayed_choices", "counter", "Choices carried over to a new engine process."),
            Spec("failed_choices", "counter", "Choices that ended in an error because the engine died."),
        ),
    ),
    (
        "KV memory and prefix cache",
        (
            Spec("kv_blocks", "gauge", "KV blocks by state; the four add up to the total.", ("group", "state")),
            Spec("kv_usage_ratio", "gauge", "Share of the KV blocks that live requests hold, of the fullest group."),
            Spec("kv_wasted_slots", "gauge", "Slots of live KV blocks that hold no token."),
            Spec("kv_capacity_tokens", "gauge", "Tokens that the KV cache can hold."),
            Spec("kv_cache_bytes", "gauge", "Memory set aside for KV."),
            Spec("weight_bytes", "gauge", "Memory of the weights."),
            Spec(
                "host_kv_blocks",
                "gauge",
                "Blocks of the host's KV pool by state; private and shared wait to come back.",
                ("group", "state"),
            ),
            Spec("host_kv_cache_bytes", "gauge", "Memory of the host set aside for KV."),
            Spec(
                "swapped_blocks", "counter", "KV blocks copied to the host's pool (out) and back (in).", ("direction",)
            ),
            Spec("prefix_query_tokens", "counter", "Prompt tokens looked up in the prefix cache."),
            Spec("prefix_hit_tokens", "counter", "Prompt tokens found in the prefix cache."),
            Spec("evicted_blocks", "counter", "Cached KV blocks reclaimed."),
        ),
    ),
    (
        "Machine and build",
        (
            Spec("accelerator_utilization_ratio", "gauge", "Share of time in which the GPU ran a kernel.", ("device",)),
            Spec("accelerator_memory_used_bytes", "gauge", "GPU memory in use, by anybody.", ("device",)),
            Spec("accelerator_memory_total_bytes", "gauge", "GPU memory.", ("device",)),
            Spec("build_info", "gauge", "Version of Octavo; always 1.", ("version",)),
            Spec(
                "model_info",
                "gauge",
                "What is served and how; always 1.",
                ("model", "architecture", "device", "kernels", "dtype", "kv_cache_dtype", "quantization"),
            ),
        ),
    ),
)
SPECS: tuple[Spec, ...] = tuple(spec for _, specs in SECTIONS for spec in specs)


def table() -> str:
    """The sections of docs/metrics.md that list the metrics, as Markdown."""
    lines = []
    for title, specs in SECTIONS:
        lines += [f"### {title}", "", "| name | kind | labels | what |", "|---|---|---|---|"]
        for spec in specs:
            labels = ", ".join(f"`{label}`" for label in spec.labels)
            lines.append(f"| `{spec.full_name}` | {spec.kind} | {labels} | {spec.text} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())  # noqa: T201
