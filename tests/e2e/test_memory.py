"""What both processes hold in memory with the default model in bfloat16. Slow: it starts a server per case."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.live import LiveServer, serving

pytestmark = pytest.mark.slow
LIMIT_BYTES = 1.5e9
KV_OF_8192_TOKENS = "180MiB"  # 30 layers, keys and values of 3 heads of 64, in bfloat16
BLOCK_SIZE = 16
PROMPT_TOKENS = 500


def _resident_bytes(server: LiveServer) -> float:
    own = server.metric("process_resident_memory_bytes")
    return own + server.metric("octavo_engine_process_resident_memory_bytes")


def _run_prompts(server: LiveServer, count: int) -> None:
    """Prompts that share nothing, each with a short answer; their KV stays in the prefix cache."""

    def run(number: int) -> int:
        prompt = [(7 * number + 13 * position) % 40_000 + 100 for position in range(PROMPT_TOKENS)]
        fields = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        with server.http(timeout=300) as http:
            return int(http.post("/v1/completions", json=fields).json()["usage"]["completion_tokens"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(count))) == [4] * count


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_both_processes_stay_under_the_limit_with_8192_tokens_of_kv_in_use(
    kernels: str, default_model_path: Path
) -> None:
    flags = ("--kernels", kernels, "--dtype", "bfloat16", "--kv-cache-memory", KV_OF_8192_TOKENS)
    with serving(*flags) as server:
        assert server.metric("octavo_kv_capacity_tokens") == 8192
        _run_prompts(server, 8192 // PROMPT_TOKENS)
        assert server.metric('octavo_kv_blocks{group="0",state="cached"}') >= 0.95 * 8192 // BLOCK_SIZE
        assert _resident_bytes(server) < LIMIT_BYTES


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_kv_memory_is_taken_as_it_is_used(kernels: str, default_model_path: Path) -> None:
    """A pool of more than the limit costs nothing before it holds something."""
    with serving("--kernels", kernels, "--dtype", "bfloat16", "--kv-cache-memory", "2GiB") as server:
        before = _resident_bytes(server)
        assert before < LIMIT_BYTES
        _run_prompts(server, 4)
        assert _resident_bytes(server) < before + 0.3e9
