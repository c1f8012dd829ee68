"""From a configuration to an executor that runs steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine import hardware
from engine.config import EngineConfig
from engine.core.plan import BlockTableTail, ScheduledSeq, SchedulerOutput, SeqId, SeqResult
from engine.errors import ConfigError, ModelError
from engine.executor import Executor
from engine.runner.local_executor import build_executor
from engine.types import GenerationRequest, LoadProgress, SamplingParams
from tests.models.cases import SCALINGS
from tests.models.tiny import VOCAB_SIZE, save


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

    assert len(run_prompt(executor, (504, 3575, 282, 4649, 314)).token_ids) == 1
    executor.forget([SeqId(1, 0)])
    executor.close()


def run_prompt(executor: Executor, prompt: tuple[int, ...]) -> SeqResult:
    """A whole prompt in one step, with the five best logprobs of the token after it."""
    record = GenerationRequest(1, prompt, SamplingParams(max_tokens=1, temperature=0.0, logprobs=5), seed=0)
    blocks = tuple(range(1, 1 + -(-len(prompt) // 16)))
    seq = ScheduledSeq(SeqId(1, 0), 0, prompt, (BlockTableTail(0, blocks),), 1, True, 0, record)
    result = executor.collect(executor.submit(SchedulerOutput(7, (seq,))))
    assert result.step_id == 7
    return result.results[0]


def test_rotations_are_those_of_the_context_that_is_left_after_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context shrinks to what fits when the weights are there; a scaling by length must know."""
    [tiny] = [case for case in SCALINGS if case.name == "dynamic"]
    folder = save(tiny.build(), tmp_path)
    prompt = tuple(range(70))
    assert len(prompt) < VOCAB_SIZE
    options = {"dtype": "float32", "kv_cache_memory_bytes": None}

    def served(context: int | None) -> tuple[int, SeqResult]:
        executor, info = build_executor(config(folder, max_model_len=context, **options), lambda _: None)
        return info.max_model_len, run_prompt(executor, prompt)

    context, unshrunk = served(None)
    assert context == 96
    block_bytes = 16 * 2 * 2 * 3 * 8 * 4
    machines = [hardware.detect(), replace(hardware.detect(), memory_available_bytes=int(5.5 * block_bytes / 0.9))]
    with monkeypatch.context() as patched:
        patched.setattr(hardware, "detect", lambda: machines.pop(0))
        shrunk = served(None)
    assert shrunk == served(80)
    assert shrunk[1] != unshrunk


def test_dummy_weights_need_no_weights_on_disk(tmp_path: Path) -> None:
    folder = save(SCALINGS[0].build(), tmp_path)
    with_weights = build_executor(config(folder), lambda _: None)[1]
    (folder / "model.safetensors").unlink()
    executor, info = build_executor(config(folder, load_format="dummy"), lambda _: None)
    assert info.quantization == "dummy"
    assert info.num_parameters == with_weights.num_parameters
    assert len(run_prompt(executor, (1, 2, 3)).token_ids) == 1


def test_memory_too_small_for_the_asked_context_names_the_flags(default_model_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len .* --kv-cache-memory"):
        build_executor(config(default_model_path, max_model_len=8192, kv_cache_memory_bytes=1 << 24), lambda _: None)


def test_kernels_that_cannot_run_here_name_the_flag(default_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it they could
    with pytest.raises(ConfigError, match="--kernels triton"):
        build_executor(config(default_model_path, kernels="triton"), lambda _: None)


def test_a_file_that_is_no_model_names_itself(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and then nothing")
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        build_executor(config(broken), lambda _: None)
