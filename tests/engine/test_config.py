"""What a configuration comes to on a given machine with a given model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig, ModelFacts, ResolvedConfig, resolve
from engine.errors import ConfigError
from engine.hardware import Hardware

GIB = 2**30
CONFIG = EngineConfig(model="model")
# 16 values a token: a block of 16 tokens is 512 bytes in bfloat16
MODEL = ModelFacts(context_length=1024, weight_bytes=GIB, kv_values_per_token=16)
MACHINE = Hardware(memory_available_bytes=5 * GIB, num_cpus=2, num_cores=2, has_cuda=False)


def asked(**changes: Any) -> ResolvedConfig:
    return resolve(replace(CONFIG, **changes), MODEL, MACHINE)


def test_everything_left_open_is_filled_in() -> None:
    resolved = resolve(CONFIG, MODEL, MACHINE)
    assert (resolved.device, resolved.dtype, resolved.kernels) == ("cpu", "bfloat16", "auto")
    assert (resolved.max_model_len, resolved.max_num_batched_tokens, resolved.num_threads) == (1024, 512, 2)


def test_kv_memory_is_a_quarter_of_what_the_weights_leave() -> None:
    big = replace(MODEL, kv_values_per_token=2**16)  # 2 MiB a block, 128 MiB a context
    resolved = resolve(CONFIG, big, MACHINE)
    assert resolved.kv_cache_bytes == GIB
    assert resolved.num_kv_blocks == 512


def test_kv_memory_stops_at_what_all_sequences_could_use() -> None:
    assert asked(max_num_seqs=3).kv_cache_bytes == 3 * 64 * 512


def test_kv_memory_takes_more_than_its_share_for_one_full_context() -> None:
    big = replace(MODEL, kv_values_per_token=2**20)  # 32 MiB a block, 2 GiB a context
    resolved = resolve(CONFIG, big, MACHINE)
    assert (resolved.kv_cache_bytes, resolved.max_model_len) == (2 * GIB, 1024)


def test_an_open_context_shrinks_to_what_fits() -> None:
    huge = replace(MODEL, kv_values_per_token=2**21)  # 64 MiB a block: 3.6 GiB hold 57 blocks
    resolved = resolve(CONFIG, huge, MACHINE)
    assert (resolved.num_kv_blocks, resolved.max_model_len) == (57, 912)


def test_a_context_that_was_asked_for_is_met_or_refused() -> None:
    huge = replace(MODEL, kv_values_per_token=2**21)
    with pytest.raises(ConfigError, match="--max-model-len"):
        resolve(replace(CONFIG, max_model_len=1024), huge, MACHINE)


def test_given_kv_memory_is_taken_in_whole_blocks() -> None:
    resolved = asked(kv_cache_memory_bytes=64 * 512 + 511)
    assert (resolved.kv_cache_bytes, resolved.num_kv_blocks, resolved.max_model_len) == (64 * 512, 64, 1024)


def test_given_kv_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        asked(kv_cache_memory_bytes=8 * GIB)


def test_float32_needs_twice_the_memory() -> None:
    assert asked(dtype="float32", max_num_seqs=1).kv_cache_bytes == 2 * asked(max_num_seqs=1).kv_cache_bytes


def test_the_kv_cache_has_the_compute_type_unless_it_is_asked_for_another() -> None:
    assert asked().kv_cache_dtype == "bfloat16"
    assert asked(dtype="float32").kv_cache_dtype == "float32"
    wide = asked(kv_cache_dtype="float32", max_num_seqs=1)
    assert (wide.dtype, wide.kv_cache_dtype) == ("bfloat16", "float32")
    assert wide.kv_cache_bytes == 2 * asked(max_num_seqs=1).kv_cache_bytes


def test_an_8_bit_kv_cache_has_a_scale_for_each_head_beside_its_values() -> None:
    heads = replace(MODEL, kv_vectors_per_token=2)  # of 8 values: 16 bytes of codes, 8 of scales
    resolved = resolve(replace(CONFIG, kv_cache_dtype="int8", max_num_seqs=1), heads, MACHINE)
    assert resolved.kv_cache_bytes == 1024 * (16 + 8)


@pytest.mark.parametrize(
    ("num_cpus", "num_cores", "expected"),
    [(1, 1, 1), (2, 2, 2), (2, 1, 2), (4, 4, 3), (8, 4, 4), (4, 2, 2), (64, 64, 63)],
)
def test_threads_leave_room_for_the_server(num_cpus: int, num_cores: int, expected: int) -> None:
    machine = replace(MACHINE, num_cpus=num_cpus, num_cores=num_cores)
    assert resolve(CONFIG, MODEL, machine).num_threads == expected


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"max_model_len": 2048}, "--max-model-len"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_num_batched_tokens": -1}, "--max-num-batched-tokens"),
        ({"block_size": 0}, "--block-size"),
        ({"num_threads": 0}, "--threads"),
        ({"kv_cache_memory_bytes": 511}, "--kv-cache-memory"),
        ({"device": "cuda"}, "--device"),
        ({"quantization_group": 48}, "--quantization-group"),
    ],
)
def test_what_cannot_work_is_refused_by_the_name_of_its_flag(changes: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        asked(**changes)


def test_a_gpu_is_taken_when_there_is_one_and_its_memory_decides() -> None:
    machine = replace(MACHINE, has_cuda=True, device_memory_available_bytes=3 * GIB)
    big = replace(MODEL, kv_values_per_token=2**16)
    resolved = resolve(CONFIG, big, machine)
    assert (resolved.device, resolved.max_num_batched_tokens) == ("cuda", 4096)
    assert resolved.kv_cache_bytes == int(2 * GIB * 0.9) // 2**21 * 2**21
