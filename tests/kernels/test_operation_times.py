"""How long each operation of a forward pass takes, told by both backends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kernels.interface import Activation, DType, HostWeight, KernelSet
from kernels.select import select
from kernels.timing import OPERATIONS


def forward_of(kernels: KernelSet) -> tuple[list[str], Callable[[], None]]:
    """A small pass, and the names of its operations."""
    x = kernels.upload(np.ones((3, 64), np.float32))
    weight = kernels.pack_vector(np.ones(64, np.float32))
    out, activated = kernels.empty((3, 64), DType.FLOAT32), kernels.empty((3, 32), DType.FLOAT32)

    def forward() -> None:
        kernels.rms_norm(x, weight, 1e-5, out)
        kernels.scale(out, 2.0)
        kernels.gated_activation(out, Activation.SILU, activated)
        kernels.rms_norm(x, weight, 1e-5, out)

    return ["rms_norm", "scale", "gated_activation", "rms_norm"], forward


@pytest.mark.parametrize("name", ["torch", "native"])
def test_operations_are_told_in_their_order_and_follow_one_another(name: str) -> None:
    kernels = select("cpu", DType.FLOAT32, name)
    names, forward = forward_of(kernels)
    first = kernels.run_timed("shape", forward)
    times = kernels.run_timed("shape", forward)
    assert first == [] if name == "native" else [time.name for time in first] == names  # native kernels record first
    assert [time.name for time in times] == names
    ends = [0.0]
    for time in times:
        assert ends[-1] <= time.begin <= time.end
        ends.append(time.end)
    kernels.close()


@pytest.mark.parametrize("name", ["torch", "native"])
def test_a_timed_pass_gives_the_same_and_leaves_the_kernels_as_they_were(name: str) -> None:
    kernels = select("cpu", DType.FLOAT32, name)
    before = dict(vars(kernels))
    x = kernels.upload(np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64))
    out, again = kernels.empty((2, 64), DType.FLOAT32), kernels.empty((2, 64), DType.FLOAT32)
    weight = kernels.pack_vector(np.ones(64, np.float32))
    kernels.run("plain", lambda: kernels.rms_norm(x, weight, 1e-5, out))
    for _ in range(2):
        kernels.run_timed("timed", lambda: kernels.rms_norm(x, weight, 1e-5, again))
    assert np.array_equal(kernels.download(out), kernels.download(again))
    assert set(vars(kernels)) == set(before)
    kernels.close()


@pytest.mark.parametrize("name", ["torch", "native"])
def test_an_operation_within_another_is_part_of_it(name: str) -> None:
    kernels = select("cpu", DType.FLOAT32, name)
    rng = np.random.default_rng(1)

    def packed(rows: int, columns: int) -> object:
        return kernels.pack_linear([HostWeight("F32", rng.standard_normal((rows, columns), np.float32), rows, columns)])

    up, down = packed(128, 64), packed(64, 64)
    x = kernels.upload(rng.standard_normal((2, 64), np.float32))
    gate_up, activated, out = (kernels.empty((2, width), DType.FLOAT32) for width in (128, 64, 64))

    def forward() -> None:
        kernels.gated_mlp(x, up, Activation.SILU, down, gate_up, activated, out)

    kernels.run_timed("shape", forward)
    assert {time.name for time in kernels.run_timed("shape", forward)} == {"gated_mlp"}
    kernels.close()


def test_the_operations_are_methods_of_the_interface() -> None:
    assert all(hasattr(KernelSet, name) for name in OPERATIONS)


def test_every_operation_of_a_forward_pass_is_told() -> None:
    """A new one has to be put on the list, or it would be missing from the shares of time."""
    others = {
        *("empty", "upload", "write", "download", "new_kv_cache", "new_host_kv_cache", "kv_block_bytes"),
        *("copy_blocks", "move_blocks", "device_memory_available_bytes", "weight_bytes"),
        *("pack_linear", "pack_experts", "pack_vector", "attach_weight", "attach_experts", "export_weight"),
        *("sample", "logprobs", "run", "run_timed", "range_begun", "range_ended", "synchronize", "close"),
    }
    public = {name for name, value in vars(KernelSet).items() if callable(value) and not name.startswith("_")}
    assert public - others == set(OPERATIONS)
