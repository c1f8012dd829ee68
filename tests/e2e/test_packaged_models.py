"""The models that `octavo serve --model NAME` knows, served side by side, against transformers.

Slow. Gemma 3 is fetched, a quarter of a gigabyte, unless the cache has it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from server.settings import DEFAULT_MODEL
from tests.e2e.live import LiveServer, serving
from tests.models.test_real_models import MARGIN, PROMPTS

pytestmark = pytest.mark.slow
GEMMA = "gemma-3-270m"
NUM_OUTPUTS = 32
BLOCK_SIZE = 16
WINDOW = 512
LONG_OUTPUT = 4096
LAST_LOOK = LONG_OUTPUT - 128  # tokens, while the request surely runs
_KV_BLOCKS = re.compile(r'^octavo_kv_blocks\{group="(\d)",state="(\w+)"\} (\S+)$', re.MULTILINE)


def test_both_serve_side_by_side_and_take_the_tokens_of_transformers(
    default_model_path: Path, gemma_path: Path
) -> None:
    flags = ("--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory", "512MiB")
    with contextlib.ExitStack() as stack:
        servers = {
            default_model_path: stack.enter_context(serving(*flags)),
            gemma_path: stack.enter_context(serving("--model", GEMMA, *flags)),
        }
        for server, name in zip(servers.values(), (DEFAULT_MODEL, GEMMA), strict=True):
            with server.http() as http:
                assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [name]
        with ThreadPoolExecutor() as pool:
            jobs = {
                path: [pool.submit(_greedy, server, prompt) for prompt in PROMPTS] for path, server in servers.items()
            }
            answers = {path: [job.result() for job in of_model] for path, of_model in jobs.items()}
    for path, pairs in answers.items():
        _assert_transformers_agrees(path, pairs)


def _greedy(server: LiveServer, prompt: str) -> tuple[list[int], list[int]]:
    """The ids of prompt and answer."""
    fields = {"max_tokens": NUM_OUTPUTS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with server.http(timeout=600) as http:
        answer = http.post("/v1/completions", json={"prompt": prompt} | fields).json()
    [choice] = answer["choices"]
    return choice["prompt_token_ids"], choice["token_ids"]


def _assert_transformers_agrees(path: Path, pairs: list[tuple[list[int], list[int]]]) -> None:
    """On the file's weights, dequantised, given prompt and answer: every token is the likeliest one, wherever rounding
    could not decide."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for prompt, outputs in pairs:
        assert len(outputs) == NUM_OUTPUTS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + outputs[:-1]]), logits_to_keep=NUM_OUTPUTS).logits[0].numpy()
        second, best = np.partition(logits, -2, axis=-1)[:, -2:].T
        sure = best - second > MARGIN
        assert sure.mean() > 0.9
        np.testing.assert_array_equal(np.array(outputs)[sure], logits.argmax(-1)[sure])


def test_layers_with_a_window_hold_no_more_memory_however_long_the_answer(gemma_path: Path) -> None:
    """A sequence holds its window and the block it writes; the layers without a window hold all of it."""
    bound = WINDOW // BLOCK_SIZE + 1
    held: list[tuple[int, int]] = []
    with serving("--model", GEMMA, "--max-num-seqs", "4") as server:
        num_tokens = 0
        for num_tokens in _stream(server):
            if num_tokens % 64 == 0 and num_tokens <= LAST_LOOK:
                held.append(_blocks_held(server))
        assert num_tokens == LONG_OUTPUT
    past_the_window = held[WINDOW // 64 :]
    assert max(window for window, _ in held) <= bound
    assert min(window for window, _ in past_the_window) >= bound - 1
    assert held[-1][1] >= LAST_LOOK // BLOCK_SIZE


def _stream(server: LiveServer) -> Iterator[int]:
    """Tokens received so far, at each."""
    fields = {"max_tokens": LONG_OUTPUT, "ignore_eos": True, "seed": 1, "stream": True, "return_token_ids": True}
    received = 0
    with (
        server.http(timeout=600) as http,
        http.stream("POST", "/v1/completions", json={"prompt": "Once upon a time"} | fields) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    for _ in choice.get("token_ids") or ():
                        received += 1
                        yield received


def _blocks_held(server: LiveServer) -> tuple[int, int]:
    """Blocks that a live sequence refers to: in the group with the window, which the first layer belongs to, and in the
    other."""
    with server.http() as http:
        text = http.get("/metrics").text
    found = {(int(group), state): int(float(count)) for group, state, count in _KV_BLOCKS.findall(text)}
    window, full = (found[group, "private"] + found[group, "shared"] for group in (0, 1))
    return window, full
