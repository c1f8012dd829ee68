"""With kernels that do without torch nothing loads it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import sys
import engine.runner.local_executor
from tests.choices import request
from tests.runner.harness import Harness
from tests.runner.null_kernels import TOKEN, null_kernels
from tests.runner.tiny import tiny_decoder

kernels = null_kernels()
harness = Harness(tiny_decoder(kernels), kernels, num_blocks=64)
tokens = harness.tokens(
    request(0, range(100), 5, logprobs=1, prompt_logprobs=1),
    request(1, range(20), 5, temperature=1.0, repetition_penalty=1.2, n=3),
)
assert tokens == [[TOKEN] * 5] * 2, tokens
sys.exit("torch" in sys.modules)
"""


NATIVE = """
import sys
from engine.config import EngineConfig
from engine.core.plan import BlockTableTail, ScheduledSeq, SchedulerOutput, SeqId
from engine.runner.local_executor import build_executor
from engine.types import GenerationRequest, SamplingParams

executor, info = build_executor(EngineConfig(sys.argv[1], kernels="native", num_threads=1), lambda progress: None)
sampling = SamplingParams(max_tokens=1, top_p=0.9, logprobs=1)
record = GenerationRequest(1, (504, 3575, 282, 4649, 314), sampling, seed=0)
seq = ScheduledSeq(SeqId(1, 0), 0, record.prompt_token_ids, (BlockTableTail(0, (1,)),), 1, True, 0, record)
[result] = executor.collect(executor.submit(SchedulerOutput(1, (seq,)))).results
assert len(result.token_ids) == len(result.logprobs) == 1, result
sys.exit("torch" in sys.modules)
"""


def run(code: str, *arguments: str) -> None:
    command = [sys.executable, "-c", code, *arguments]
    finished = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_steps_on_other_kernels_do_not_load_torch() -> None:
    run(CODE)


def test_the_default_model_on_the_native_kernels_does_not_load_torch(default_model_path: Path) -> None:
    if importlib.util.find_spec("kernels.native._native") is None:
        pytest.skip("the native kernels are not built")
    run(NATIVE, str(default_model_path))
