"""What each server calls the few figures that a load test wants from /metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """One series of one server: the value is the sum over label sets that have all of `labels`."""

    metric: str
    labels: tuple[tuple[str, str], ...] = ()


# figure → where to look; the first source whose metric is on the page is taken
SOURCES: dict[str, tuple[Source, ...]] = {
    "running": (
        Source("octavo_requests_running"),
        Source("vllm:num_requests_running"),
        Source("sglang:num_running_reqs"),
        Source("llamacpp:requests_processing"),
        Source("tgi_batch_current_size"),
    ),
    "waiting": (
        Source("octavo_requests_waiting"),
        Source("vllm:num_requests_waiting"),
        Source("sglang:num_queue_reqs"),
        Source("llamacpp:requests_deferred"),
        Source("tgi_queue_size"),
    ),
    "step_prefill_tokens": (Source("octavo_step_prefill_tokens"),),  # of the step at the time of the sample
    "step_decode_tokens": (Source("octavo_step_decode_tokens"),),
    "kv_use": (  # share of the KV memory that live requests hold, 0 … 1
        Source("vllm:kv_cache_usage_perc"),
        Source("vllm:gpu_cache_usage_perc"),
        Source("sglang:token_usage"),
    ),
    "kv_free_blocks": (Source("octavo_kv_blocks", (("state", "free"),)),),
    "kv_private_blocks": (Source("octavo_kv_blocks", (("state", "private"),)),),
    "kv_shared_blocks": (Source("octavo_kv_blocks", (("state", "shared"),)),),
    "kv_cached_blocks": (Source("octavo_kv_blocks", (("state", "cached"),)),),
    "preemptions": (
        Source("octavo_preemptions_total"),
        Source("vllm:num_preemptions_total"),
        Source("sglang:num_retracted_requests_total"),
    ),
    "prefix_queried_tokens": (
        Source("octavo_prefix_query_tokens_total"),
        Source("vllm:prefix_cache_queries_total"),
    ),
    "prefix_hit_tokens": (
        Source("octavo_prefix_hit_tokens_total"),
        Source("vllm:prefix_cache_hits_total"),
        Source("sglang:cached_tokens_total"),
    ),
    "output_tokens": (
        Source("octavo_generation_tokens_total"),
        Source("vllm:generation_tokens_total"),
        Source("sglang:generation_tokens_total"),
        Source("llamacpp:tokens_predicted_total"),
    ),
}
