"""docs/metrics.md says what is exported."""

from __future__ import annotations

import re
from pathlib import Path

from monitoring.catalogue import SPECS, table

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
NAMES = {spec.full_name for spec in SPECS}


def test_the_tables_are_those_of_the_catalogue() -> None:
    """To mend: replace what stands between the comments by the output of `python -m monitoring.catalogue`."""
    inside = DOC.partition("<!-- begin: python -m monitoring.catalogue -->\n")[2].partition("<!-- end -->")[0]
    assert inside.strip() == table().strip()


def test_every_name_on_the_page_exists() -> None:
    suffix = re.compile(r"_(bucket|sum|count)$")
    for name in re.findall(r"\boctavo_\w+", DOC):
        assert name in NAMES or suffix.sub("", name) in NAMES or name.startswith("octavo_engine_process_"), name


def test_every_metric_of_vllm_has_its_line() -> None:
    """Those of the reference list of a recent version."""
    page = DOC.partition("## Coming from vLLM")[2]
    gauges = "num_requests_running num_requests_waiting kv_cache_usage_perc lora_requests_info cache_config_info"
    counters = (
        "prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_cached generation_tokens "
        "request_success corrupted_requests"
    )
    histograms = (
        "request_prompt_tokens request_generation_tokens iteration_tokens_total request_params_n "
        "request_params_max_tokens time_to_first_token_seconds inter_token_latency_seconds "
        "request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds "
        "request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds"
    )
    for name in f"{gauges} {counters} {histograms}".split():
        assert f"`vllm:{name}`" in page, name
