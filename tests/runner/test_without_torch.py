"""With kernels that do without torch nothing loads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import sys
import engine.runner.local_executor
from tests.runner.harness import Harness, request
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


def test_steps_on_other_kernels_do_not_load_torch() -> None:
    finished = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, check=False, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
