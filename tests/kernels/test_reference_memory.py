"""Arrays, transfers and the KV cache's blocks."""

from __future__ import annotations

import resource
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kernels.interface import DType, KernelSet, KVCacheSpec
from tests.kernels.cases import AttentionCase, fill_cache, normal, put


@pytest.mark.parametrize("dtype", list(DType))
def test_an_array_of_each_type_comes_back(reference: KernelSet, dtype: DType) -> None:
    host = np.arange(12).reshape(3, 4)
    array = reference.upload(host, dtype)
    assert tuple(array.shape) == (3, 4)
    np.testing.assert_array_equal(reference.download(array), host)


def test_bfloat16_of_the_host_is_taken_bit_for_bit(reference: KernelSet) -> None:
    host = normal(5, 3).astype(ml_dtypes.bfloat16)
    got = reference.download(reference.upload(host))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, host.astype(np.float32))


def test_read_only_and_strided_hosts_are_taken(reference: KernelSet) -> None:
    host = normal(6, 8)
    host.flags.writeable = False
    np.testing.assert_array_equal(reference.download(reference.upload(host[::2, 1:])), host[::2, 1:])


def test_a_download_stays_when_the_array_changes(reference: KernelSet) -> None:
    array = reference.upload(np.zeros(4, np.int32))
    before = reference.download(array)
    reference.write(array[1:3], np.array([7, 8], np.int32))
    assert before.tolist() == [0, 0, 0, 0]
    assert reference.download(array).tolist() == [0, 7, 8, 0]


def test_block_bytes_count_all_layers_keys_and_values(reference: KernelSet) -> None:
    spec = KVCacheSpec(3, 10, 16, 2, 64, 32, reference.activation_dtype)
    size = 4 if reference.activation_dtype is DType.FLOAT32 else 2
    assert reference.kv_block_bytes(spec) == 3 * 16 * 2 * (64 + 32) * size


def test_blocks_move_to_the_host_and_back(reference: KernelSet) -> None:
    """Whole blocks, all layers, whatever the two caches' sizes."""
    dtype = reference.activation_dtype
    device = reference.new_kv_cache(KVCacheSpec(2, 5, 4, 1, 2, 2, dtype))
    host = reference.new_host_kv_cache(KVCacheSpec(2, 9, 4, 1, 2, 2, dtype))
    rows = np.arange(5, dtype=np.float32)[:, None] * np.ones((1, 32), np.float32)
    device.blocks.copy_(reference.upload(rows, dtype))
    reference.move_blocks(device, np.array([4, 1, 2], np.int32), host, np.array([8, 2, 1], np.int32))
    reference.move_blocks(host, np.array([2, 8], np.int32), device, np.array([3, 1], np.int32))
    reference.move_blocks(host, np.empty(0, np.int32), device, np.empty(0, np.int32))
    reference.synchronize()
    assert reference.download(host.blocks).mean(axis=1).tolist() == [0, 2, 1, 0, 0, 0, 0, 0, 4]
    assert reference.download(device.blocks).mean(axis=1).tolist() == [0, 4, 2, 1, 4]


def test_copies_of_a_step_all_read_before_any_writes(reference_float32: KernelSet) -> None:
    """1 → 2 while 2 → 3: block 3 gets what 2 held before. All layers go along."""
    spec = KVCacheSpec(2, 5, 4, 1, 2, 2, DType.FLOAT32)
    cache = reference_float32.new_kv_cache(spec)
    cache.blocks.copy_(reference_float32.upload(np.arange(5, dtype=np.float32)[:, None] * np.ones((1, 32), np.float32)))
    reference_float32.copy_blocks(cache, np.array([1, 2, 2], np.int32), np.array([2, 3, 4], np.int32))
    assert reference_float32.download(cache.blocks).mean(axis=1).tolist() == [0, 1, 1, 2, 2]
    reference_float32.copy_blocks(cache, np.empty(0, np.int32), np.empty(0, np.int32))


def test_a_token_is_stored_in_its_slot_of_its_layer_and_nowhere_else(reference: KernelSet) -> None:
    spec = KVCacheSpec(2, 4, 4, 2, 3, 5, reference.activation_dtype)
    cache = reference.new_kv_cache(spec)
    k, held_k = put(reference, normal(3, 2, 3))
    v, held_v = put(reference, normal(3, 2, 5, seed=1))
    q = reference.empty((3, 2, 3), reference.activation_dtype)
    slots = reference.upload(np.array([13, -1, 6], np.int64))
    reference.rope_and_store_kv(q, k, v, reference.upload(np.zeros(3, np.int32)), None, None, cache, 1, slots)
    rows = reference.download(cache.layers[1].rows)
    for row, block, offset in ((0, 3, 1), (2, 1, 2)):
        np.testing.assert_array_equal(rows[block, offset], np.concatenate((held_k[row].ravel(), held_v[row].ravel())))
    assert np.count_nonzero(reference.download(cache.blocks)) == 2 * 2 * (3 + 5)


def test_a_new_cache_is_zero(reference: KernelSet) -> None:
    cache = reference.new_kv_cache(KVCacheSpec(1, 3, 4, 1, 2, 2, reference.activation_dtype))
    assert not reference.download(cache.blocks).any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_cache_in_host_memory_takes_memory_as_it_is_written(reference: KernelSet, device: str) -> None:
    if device != "cpu":
        pytest.skip("a GPU's memory is taken at once")
    spec = KVCacheSpec(4, 8192, 16, 4, 64, 64, reference.kv_dtype)  # half a gigabyte at least
    before = _resident_bytes()
    cache = reference.new_kv_cache(spec)
    total_bytes = spec.num_blocks * reference.kv_block_bytes(spec)
    assert _resident_bytes() - before < total_bytes // 16
    reference.copy_blocks(cache, np.zeros(64, np.int32), np.arange(1, 65, dtype=np.int32))
    assert _resident_bytes() - before < total_bytes // 8


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_the_cases_themselves_fill_what_nobody_owns_with_nan(reference_float32: KernelSet) -> None:
    batch = fill_cache(reference_float32, AttentionCase("one", ((1, 17),)))
    keys = reference_float32.download(batch.cache.layers[1].rows)
    assert np.isnan(keys[1:]).all(axis=-1).sum() == 4 * 16 - 17


def test_int8_blocks_hold_codes_and_a_scale_per_token_and_head(reference: KernelSet) -> None:
    """Each value within half a step of absmax / 127; another token's outlier changes nothing. Copies are whole."""
    spec = KVCacheSpec(2, 4, 4, 2, 3, 5, DType.INT8)
    assert reference.kv_block_bytes(spec) == 2 * 4 * 2 * (3 + 5) + 2 * 2 * 4 * 2 * 4
    cache = reference.new_kv_cache(spec)
    values = normal(2, 2, 5)
    values[1] *= 1000
    values[0, 1] = 0.0
    k, v = put(reference, normal(2, 2, 3))[0], put(reference, values)[0]
    q, positions = reference.empty((2, 2, 3), reference.activation_dtype), reference.upload(np.zeros(2, np.int32))
    slots = reference.upload(np.array([5, 6], np.int64))
    reference.rope_and_store_kv(q, k, v, positions, None, None, cache, 1, slots)
    reference.copy_blocks(cache, np.array([1], np.int32), np.array([3], np.int32))
    held = reference.download(v)
    for block in (1, 3):
        codes = reference.download(cache.layers[1].rows)[block, 1:3, 2 * 3 :].reshape(2, 2, 5)
        scales = reference.download(cache.layers[1].scales)[block, 1:3, 2:]
        np.testing.assert_allclose(scales, np.abs(held).max(axis=-1) / 127, rtol=1e-6)
        assert (np.abs(codes * scales[..., None] - held) <= 0.501 * scales[..., None]).all()
