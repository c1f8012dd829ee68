"""From a configuration to an executor that runs steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core.plan import BlockTableTail, ScheduledSeq, SchedulerOutput, SeqId
from engine.errors import ConfigError, ModelError
from engine.runner.local_executor import build_executor
from engine.types import GenerationRequest, LoadProgress, SamplingParams


def config(model: Path, **options: object) -> EngineConfig:
    fields: dict[str, object] = {"kernels": "torch", "num_threads": 1, "kv_cache_memory_bytes": 1 << 28}
    return EngineConfig(str(model), **(fields | options))  # type: ignore[arg-type]


def test_the_default_model_runs_and_says_what_it_is(default_model_path: Path) -> None:
    heard: list[LoadProgress] = []
    executor, info = build_executor(config(default_model_path), heard.append)
    fractions = [progress.fraction for progress in heard]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0.0
    assert fractions[-1] < 1.0
    assert info.architecture == "llama"
    assert info.quantization == "Q4_1"
    assert (info.vocab_size, info.hidden_size, info.max_model_len) == (49152, 576, 8192)
    assert (info.dtype, info.kv_cache_dtype, info.device) == ("bfloat16", "bfloat16", "cpu")
    assert info.num_parameters == 134_515_008
    assert info.weight_bytes == 134_515_008 * 2 + 61 * 576 * 2  # the norms in float32
    assert info.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    [num_blocks] = info.num_kv_blocks
    assert num_blocks == (1 << 28) // (16 * info.kv_bytes_per_token)
    assert info.kv_capacity_tokens == num_blocks * 16
    capacity = executor.capacity()
    assert capacity.groups[0].num_blocks == num_blocks + 1
    assert info.kv_cache_bytes == (num_blocks + 1) * 16 * info.kv_bytes_per_token

    record = GenerationRequest(1, (504, 3575, 282, 4649, 314), SamplingParams(max_tokens=1, temperature=0.0), seed=0)
    seq = ScheduledSeq(SeqId(1, 0), 0, record.prompt_token_ids, (BlockTableTail(0, (1,)),), 1, True, 0, record)
    ticket = executor.submit(SchedulerOutput(7, (seq,)))
    result = executor.collect(ticket)
    assert result.step_id == 7
    assert len(result.results[0].token_ids) == 1
    executor.forget([SeqId(1, 0)])
    executor.close()


def test_memory_too_small_for_the_asked_context_names_the_flags(default_model_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len .* --kv-cache-memory"):
        build_executor(config(default_model_path, max_model_len=8192, kv_cache_memory_bytes=1 << 24), lambda _: None)


def test_kernels_that_cannot_run_here_name_the_flag(default_model_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kernels triton"):
        build_executor(config(default_model_path, kernels="triton"), lambda _: None)


def test_a_file_that_is_no_model_names_itself(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and then nothing")
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        build_executor(config(broken), lambda _: None)
