"""The card's benchmark: its cases at tiny sizes in the interpreter; no card, no figures."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from kernels import bench as command
from kernels.interface import DType
from kernels.triton import bench
from kernels.triton.triton_kernels import TritonKernels
from tests.kernels.triton.conftest import DEVICE

TINY = bench.Sizes(
    copy_bytes=1 << 10,
    product=16,
    weight_bytes_between_turns=0,
    heads=4,
    kv_heads=2,
    head_dim=16,
    decodes=2,
    context=32,
    prompts=1,
    prompt_tokens=16,
    weights=((128, 64),),
    few_tokens=(1,),
    many_tokens=(17,),
    rows=2,
    vocabulary=100,
)


def test_every_case_runs_and_is_set_beside_a_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench.bench(torch.device(DEVICE), TINY, repeats=1)
    cases = json.loads(json.dumps(report))["cases"]
    assert len(cases) == 4 + 5 * 2 + 5
    assert all(case["seconds"] > 0 and case["of_ceiling"] > 0 for case in cases)
    assert "of ceiling" in capsys.readouterr().out


def test_the_bytes_and_operations_of_a_case() -> None:
    """Decodes read the whole context's keys and values; a causal prefill multiplies half of all pairs."""
    kernels = TritonKernels(DEVICE, DType.BFLOAT16, 1)
    by_name = {case.name: case for case in bench._attention(kernels, TINY)}
    decode = by_name["attention, decode, 2 × 32, KV bfloat16"]
    assert decode.num_bytes == 2 * 32 * 2 * (16 + 16) * 2
    prefill = by_name["attention, prefill, 1 × 16, KV bfloat16"]
    assert prefill.num_flops == 4 * (16 * 17 / 2) * 4 * 16


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cuda"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1
    assert "no NVIDIA GPU" in capsys.readouterr().err
