"""Several choices of one prompt on the native kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("kernels.native._native", reason="the native kernels are not built")

from engine.core.plan import SeqId
from kernels.interface import DType
from kernels.select import select
from tests.choices import request
from tests.runner.harness import Harness
from tests.runner.tiny import tiny_decoder


def test_choices_that_fork_within_a_block() -> None:
    """Seen through the openai client: n = 4 ended the engine process ("sources: the last axis is not contiguous"), for
    three copies in one step came as columns of one array."""
    native = select("cpu", DType.FLOAT32, "native")
    harness = Harness(tiny_decoder(native), native)
    prompt = range(20)  # ends within a block
    outcomes = harness.run(request(0, prompt, 12, n=4, temperature=1.0, seed=5))
    alone = Harness(tiny_decoder(native), native)
    for choice in range(4):
        one = request(1 + choice, prompt, 12, choice_index=choice, temperature=1.0, seed=5)
        assert outcomes[SeqId(0, choice)].token_ids == alone.tokens(one)[0]
