"""Arrays, recorded steps, blocks, threads, and the choice of kernels."""

from __future__ import annotations

import builtins
import importlib.util
import logging
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

from kernels.interface import DType, KVCacheSpec
from kernels.native.native_kernels import NativeKernels
from kernels.select import select
from tests.kernels.cases import host_weight, normal
from tests.kernels.native_cases import EVERY_ISA, kernels_for, native, same_bits
from tests.kernels.sampling_cases import PHILOX_VECTORS, batch, philox


def test_a_recorded_step_reads_its_buffers_anew() -> None:
    kernels = kernels_for("", 2)
    weight = kernels.pack_linear([host_weight("F32", 48, 64)[0]])
    x, y, norm = kernels.upload(normal(5, 64)), kernels.empty((5, 48), DType.FLOAT32), kernels.pack_vector(normal(64))
    calls = 0

    def forward() -> None:
        nonlocal calls
        calls += 1
        kernels.rms_norm(x, norm, 1e-5, x)
        kernels.linear(x, weight, y)

    kernels.run("shape", forward)
    for seed in (1, 2):
        host = normal(5, 64, seed=seed)
        kernels.write(x, host)
        kernels.run("shape", forward)
        replayed = kernels.download(y)
        kernels.write(x, host)
        forward()
        same_bits(replayed, y)
    assert calls == 3  # recorded once; the others are those called here


def test_shapes_have_plans_of_their_own_and_the_oldest_goes() -> None:
    kernels = kernels_for("", 1)
    x = kernels.upload(np.ones((600, 4), np.float32))
    calls: list[int] = []

    def scale(rows: int) -> None:
        calls.append(rows)
        kernels.scale(x[:rows], 2.0)

    for rows in (3, 5, 3, 5):
        kernels.run(rows, partial(scale, rows))
    assert calls == [3, 5]
    assert kernels.download(x)[:6, 0].tolist() == [16, 16, 16, 4, 4, 1]
    for rows in range(10, 522):
        kernels.run(rows, partial(scale, rows))
    kernels.run(5, partial(scale, 5))
    assert calls[-1] == 5


def test_an_error_while_recording_leaves_no_plan() -> None:
    kernels = kernels_for("", 1)

    def fail() -> None:
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            kernels.run("shape", fail)

    def draw() -> None:
        kernels.sample(np.zeros((1, 4), np.float32), batch(1))

    with pytest.raises(RuntimeError, match="recorded"):
        kernels.run("draw", draw)


@pytest.mark.parametrize("isa", EVERY_ISA)
def test_philox_gives_the_published_vectors(isa: str) -> None:
    """Purpose 0 only, so the first vector; the others through the formula that reproduces them."""
    session = native.Session(isa, 1)
    assert session.philox(0, 0, 0, 0)[0] == PHILOX_VECTORS[0][2][0]
    seed, token, position, choice = 0x299F31D0A4093822, 0x243F6A88, 0x85A308D3, 0x13198A2E
    words = session.philox(seed, token, position, choice)
    expected = [philox((token + lane, position, choice, 0), (seed % 2**32, seed >> 32))[0] for lane in range(16)]
    assert words == expected


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT8])
def test_copies_of_a_step_all_read_before_any_writes(dtype: DType) -> None:
    """1 → 2 while 2 → 3: block 3 gets what 2 held before. All layers go along."""
    kernels = kernels_for("", 3)
    spec = KVCacheSpec(2, 6, 4, 1, 2, 2, dtype)
    cache = kernels.new_kv_cache(spec)
    assert not cache.blocks.any()
    assert cache.blocks.shape == (6, kernels.kv_block_bytes(spec))
    cache.blocks[...] = np.arange(6, dtype=np.uint8)[:, None]
    kernels.copy_blocks(cache, np.array([1, 2, 2], np.int32), np.array([2, 3, 4], np.int32))
    assert cache.blocks.mean(axis=1).tolist() == [0, 1, 1, 2, 2, 5]
    kernels.copy_blocks(cache, np.array([5], np.int32), np.array([0], np.int32))
    kernels.copy_blocks(cache, np.empty(0, np.int32), np.empty(0, np.int32))
    assert cache.blocks.mean(axis=1).tolist() == [5, 1, 1, 2, 2, 5]
    with pytest.raises(ValueError, match="does not exist"):
        kernels.copy_blocks(cache, np.array([6], np.int32), np.array([0], np.int32))


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT8])
def test_blocks_move_to_the_host_and_back(dtype: DType) -> None:
    """Whole blocks, all layers, whatever the two caches' sizes."""
    kernels = kernels_for("", 2)
    device = kernels.new_kv_cache(KVCacheSpec(2, 5, 4, 1, 2, 2, dtype))
    host = kernels.new_host_kv_cache(KVCacheSpec(2, 9, 4, 1, 2, 2, dtype))
    device.blocks[...] = np.arange(5, dtype=np.uint8)[:, None]
    kernels.move_blocks(device, np.array([4, 1, 2], np.int32), host, np.array([8, 2, 1], np.int32))
    kernels.move_blocks(host, np.array([2, 8], np.int32), device, np.array([3, 1], np.int32))
    kernels.move_blocks(host, np.empty(0, np.int32), device, np.empty(0, np.int32))
    assert host.blocks.mean(axis=1).tolist() == [0, 2, 1, 0, 0, 0, 0, 0, 4]
    assert device.blocks.mean(axis=1).tolist() == [0, 4, 2, 1, 4]


def test_weights_are_counted() -> None:
    kernels = kernels_for("", 1)
    kernels.pack_linear([host_weight("F32", 32, 64)[0]])
    kernels.pack_vector(normal(5))
    assert kernels.weight_bytes() == 32 * 64 * 4 + 5 * 4


def test_an_instruction_set_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'sse9' cannot run here; available: portable"):
        kernels_for("sse9")
    monkeypatch.setenv("OCTAVO_ISA", "portable")
    assert NativeKernels(DType.FLOAT32).isa == "portable"


def test_auto_takes_the_native_kernels_on_a_cpu() -> None:
    kernels = select("cpu", DType.BFLOAT16, "auto", 2)
    assert isinstance(kernels, NativeKernels)
    assert kernels.name == "native"
    assert kernels.kv_dtype is DType.BFLOAT16
    assert kernels.num_threads == 2
    with pytest.raises(ValueError, match="run on cpu, not on cuda"):
        select("cuda", DType.BFLOAT16, "native")


def test_without_the_extension_auto_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_import = builtins.__import__

    def no_extension(name: str, *args: Any, **keywords: Any) -> Any:
        if name.startswith("kernels.native"):
            raise ImportError("No module named '_native'")
        return real_import(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", no_extension)
    with caplog.at_level(logging.WARNING):
        assert select("cpu", DType.FLOAT32, "auto", 1).name == "torch"
    assert [record.message for record in caplog.records] == [
        "native kernels are not built (No module named '_native'): using the slower torch kernels; "
        "install a C++17 compiler and run pip install . again"
    ]
    with pytest.raises(ValueError, match="install a C\\+\\+17 compiler"):
        select("cpu", DType.FLOAT32, "native", 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"install a C\+\+17 compiler .*, or pip install 'octavo\[torch\]'"):
        select("cpu", DType.FLOAT32, "auto", 1)


def test_native_kernels_load_no_torch() -> None:
    code = (
        "import sys; from kernels.select import select; from kernels.interface import DType;"
        "assert select('cpu', DType.BFLOAT16).name == 'native'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
