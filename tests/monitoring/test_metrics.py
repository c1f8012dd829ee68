"""The registry, what is read at scrapes, and what recording costs."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from engine.types import KVGroupStats, StepStats
from monitoring.accelerator import Accelerators
from monitoring.catalogue import SPECS
from monitoring.engine_state import EngineLife, Totals
from monitoring.metrics import Metrics
from tests.server.toy import samples

STEP = StepStats(
    step_id=5,
    num_running=2,
    num_waiting=3,
    num_prefill_tokens=40,
    num_decode_tokens=2,
    kv_groups=(
        KVGroupStats(free=6, private=1, shared=2, cached=1),
        KVGroupStats(free=1, private=3, shared=0, cached=1),
    ),
    num_wasted_slots=7,
    oldest_waiting_steps=4,
    prefix_query_tokens_total=100,
    prefix_hit_tokens_total=60,
    evicted_blocks_total=8,
    preemptions_total=3,
    preempted_tokens_total=50,
    overrun_tokens_total=2,
    parked_total=1,
    swapped_out_blocks_total=6,
    swapped_in_blocks_total=4,
    kv_host_groups=(KVGroupStats(free=5, private=2, shared=0, cached=3),),
    forward_seconds=0.015,
    sample_seconds=0.003,
    kernel_seconds=(("linear", 0.009), ("paged_attention", 0.006)),
    schedule_seconds=0.001,
    execute_seconds=0.02,
    update_seconds=0.002,
    publish_seconds=0.0005,
    gap_seconds=0.004,
)


def scrape(metrics: Metrics) -> dict[str, float]:
    return samples(metrics.render()[0].decode())


def test_every_metric_of_the_catalogue_is_exported_and_no_other_of_ours() -> None:
    text = Metrics("1", lambda: STEP, EngineLife).render()[0].decode()
    exported = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE octavo_")}
    assert exported - {spec.full_name for spec in SPECS} == set()
    assert {spec.full_name for spec in SPECS} - exported == set()
    assert "_created" not in text


def test_names_follow_prometheus_conventions() -> None:
    for spec in SPECS:
        assert spec.name.isidentifier()
        assert not spec.name.endswith("_total"), "the suffix is added for counters"
        assert not any(unit in spec.name for unit in ("_ms", "_milliseconds", "_mib", "_percent"))
        assert spec.text.endswith(".")
        assert (spec.kind == "histogram") == bool(spec.buckets)
        assert list(spec.buckets) == sorted(set(spec.buckets))


def test_latency_buckets_resolve_a_millisecond_to_minutes() -> None:
    for spec in SPECS:
        if spec.name.startswith(("time_to_first", "inter_token", "request_")) and spec.name.endswith("_seconds"):
            assert spec.buckets[0] == 0.001
            assert spec.buckets[-1] >= 600
            steps = [high / low for low, high in zip(spec.buckets, spec.buckets[1:], strict=False)]
            assert max(steps) <= 2.5


def test_the_engines_state_is_read_when_scraped() -> None:
    life = EngineLife(1, 4, 2, 3, 1.5)
    found = scrape(Metrics("1", lambda: STEP, lambda: life))
    assert found["octavo_requests_running"] == 2
    assert found["octavo_requests_waiting"] == 3
    assert found["octavo_oldest_waiting_seconds"] == 1.5
    assert found["octavo_kv_blocks{group=0,state=shared}"] == 2
    assert found["octavo_kv_blocks{group=1,state=private}"] == 3
    assert found["octavo_kv_usage_ratio"] == 3 / 5
    assert found["octavo_preemptions_total{kind=recompute}"] == 2
    assert found["octavo_preemptions_total{kind=swap}"] == 1
    assert found["octavo_overrun_tokens_total"] == 2 + 3
    assert found["octavo_host_kv_blocks{group=0,state=cached}"] == 3
    assert [found[f"octavo_swapped_blocks_total{{direction={way}}}"] for way in ("out", "in")] == [6, 4]
    assert (found["octavo_engine_restarts_total"], found["octavo_replayed_choices_total"]) == (1, 4)
    assert found["octavo_failed_choices_total"] == 2


def test_without_an_engine_the_page_is_whole_and_the_counts_stand() -> None:
    now: list[StepStats | None] = [STEP]
    metrics = Metrics("1", lambda: now[0])
    before = scrape(metrics)
    now[0] = None
    after = scrape(metrics)
    assert after["octavo_requests_running"] == 0
    assert after["octavo_kv_usage_ratio"] == 0
    assert after["octavo_evicted_blocks_total"] == before["octavo_evicted_blocks_total"] == 8
    assert {name for name in before if "kv_blocks" not in name} <= set(after)


def test_counts_go_on_when_a_new_engine_counts_from_zero() -> None:
    totals = Totals()
    totals.note(STEP, 0)
    totals.note(replace(STEP, step_id=2, evicted_blocks_total=1), 1)
    assert (totals["engine_steps"], totals["evicted_blocks"]) == (7, 9)
    totals.note(replace(STEP, step_id=3, evicted_blocks_total=4), 1)
    totals.note(replace(STEP, step_id=3, evicted_blocks_total=4), 1)  # told twice
    assert (totals["engine_steps"], totals["evicted_blocks"]) == (8, 12)


def test_experts_have_a_series_each_within_a_bound_and_outlive_their_process() -> None:
    life, step = [EngineLife()], [replace(STEP, expert_tokens_total=(3, 0, 5))]
    metrics = Metrics("1", lambda: step[0], lambda: life[0])
    assert "expert_tokens_total{" not in Metrics("1", lambda: STEP).render()[0].decode()
    assert [scrape(metrics)[f"octavo_expert_tokens_total{{expert={expert}}}"] for expert in range(3)] == [3, 0, 5]
    life, step = [EngineLife(restarts=1)], [STEP]  # a new process that has not run a step
    assert scrape(metrics)["octavo_expert_tokens_total{expert=2}"] == 5
    step = [replace(STEP, expert_tokens_total=(1,) * 300)]
    found = {name: value for name, value in scrape(metrics).items() if "expert_tokens" in name}
    assert len(found) == 257
    assert found["octavo_expert_tokens_total{expert=2}"] == 6
    assert found["octavo_expert_tokens_total{expert=other}"] == 300 - 256


def test_each_step_is_split_into_its_phases() -> None:
    metrics = Metrics("1", lambda: STEP)
    metrics.step_done(STEP, 3, 0)
    found = scrape(metrics)
    phases = ("schedule", "prepare", "forward", "sample", "update", "publish", "gap")
    sums = [found[f"octavo_step_phase_seconds_sum{{phase={phase}}}"] for phase in phases]
    assert sums == pytest.approx([0.001, 0.02 - 0.018, 0.015, 0.003, 0.002, 0.0005, 0.004])
    kernels = [found[f"octavo_sampled_kernel_seconds_total{{kernel={name}}}"] for name in ("linear", "paged_attention")]
    assert kernels == [0.009, 0.006]
    assert (found["octavo_step_sequences_sum"], found["octavo_step_tokens_sum"]) == (3, 42)
    assert found["octavo_computed_tokens_total{kind=prefill}"] == 40
    assert found["octavo_computed_tokens_total{kind=decode}"] == 2


def test_tokens_that_arrive_together_share_their_time() -> None:
    metrics = Metrics("1", lambda: None)
    metrics.next_tokens(4, 0.2)
    found = scrape(metrics)
    assert found["octavo_inter_token_seconds_count"] == 4
    assert found["octavo_inter_token_seconds_sum"] == pytest.approx(0.2)


def test_both_processes_are_measured() -> None:
    import os

    found = scrape(Metrics("1", lambda: None, lambda: EngineLife(pid=os.getppid())))
    for name in ("process_resident_memory_bytes", "octavo_engine_process_resident_memory_bytes"):
        assert found[name] > 0
    gone = scrape(Metrics("1", lambda: None, EngineLife))
    assert "octavo_engine_process_resident_memory_bytes" not in gone


def test_recording_a_step_costs_less_than_one_percent_of_a_short_step() -> None:
    """5 ms is a short step: the default model's, for one stream, on a fast CPU."""
    metrics = Metrics("1", lambda: STEP)
    best = min(_seconds_for_steps(metrics, 200) for _ in range(5))
    assert best / 200 < 0.01 * 0.005


def _seconds_for_steps(metrics: Metrics, count: int) -> float:
    begin = time.thread_time()
    for _ in range(count):
        metrics.step_done(STEP, 64, 0)
    return time.thread_time() - begin


class NvmlError(Exception):
    pass


def fake_nvml(**changes: Any) -> Any:
    def utilization(handle: int) -> Any:
        if handle == 1:
            raise NvmlError
        return SimpleNamespace(gpu=40)

    module = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=utilization,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3, total=10),
    )
    vars(module).update(changes)
    return module


def test_gpus_are_read_where_there_are_any_and_one_that_fails_is_left_out() -> None:
    found = scrape(Metrics("1", lambda: None, accelerators=Accelerators(fake_nvml())))
    assert found["octavo_accelerator_utilization_ratio{device=0}"] == 0.4
    assert found["octavo_accelerator_memory_used_bytes{device=0}"] == 3
    assert found["octavo_accelerator_memory_total_bytes{device=0}"] == 10
    assert not any("device=1" in name for name in found)


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    def fail() -> None:
        raise NvmlError

    assert Accelerators(fake_nvml(nvmlInit=fail)).samples() == []
    assert Accelerators(None).samples() == []


def test_openmetrics_is_spoken_to_who_asks_for_it_and_says_the_same() -> None:
    metrics = Metrics("1", lambda: STEP, EngineLife)
    metrics.first_token(0.3, {"trace_id": "ab" * 16, "span_id": "cd" * 8})
    plain, plain_type = metrics.render("text/plain")
    text, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert plain_type.startswith("text/plain")
    assert content_type.startswith("application/openmetrics-text")
    families = list(openmetrics_families(text.decode()))  # type: ignore[no-untyped-call]
    exemplars = [sample.exemplar for family in families for sample in family.samples if sample.exemplar]
    assert [exemplar.labels["trace_id"] for exemplar in exemplars] == ["ab" * 16]
    ours = {sample.name for family in families for sample in family.samples if sample.name.startswith("octavo_")}
    assert ours >= {name.partition("{")[0] for name in samples(plain.decode()) if name.startswith("octavo_")}
