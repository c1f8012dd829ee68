"""Log-likelihoods over HTTP, by echo and logprobs as lm-eval asks for them, beside transformers' own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from server.text.loading import load_tokenizer
from tests.conformance.conftest import MODEL
from tests.e2e.live import LiveServer, serving
from tests.runner.oracle import load_default_model, reference_logits
from tests.runner.prompts import SHORT

TOLERANCE = 1e-3
IN_CI = ("prose", "python", "chinese", "emoji", "chat", "maths")


class Scored(NamedTuple):
    """What lm-eval keeps of a continuation."""

    log_likelihood: float
    is_greedy: bool  # every token of it is the likeliest in its place


@pytest.fixture(scope="module")
def exact_server(default_model_path: Path) -> Iterator[LiveServer]:
    """The default model in float32, as transformers computes it."""
    with serving("--kernels", "torch", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def oracle(default_model_path: Path) -> LlamaForCausalLM:
    torch.set_num_threads(2)
    return load_default_model(default_model_path)


def halves(text: str) -> tuple[str, str]:
    """A context, and the continuation to be scored."""
    middle = max(1, len(text) * 2 // 3)
    return text[:middle], text[middle:]


def expected(oracle: LlamaForCausalLM, context: list[int], continuation: list[int]) -> Scored:
    logits = reference_logits(oracle, [*context, *continuation[:-1]], len(continuation))
    rows = torch.log_softmax(logits.double(), dim=-1)
    picked = rows[torch.arange(len(continuation)), torch.tensor(continuation)]
    return Scored(float(picked.sum()), rows.argmax(dim=-1).tolist() == continuation)


def over_http(http: httpx.Client, pairs: list[tuple[list[int], list[int]]]) -> list[Scored]:
    """In one request for all, with the fields that lm-eval's `local-completions` sends."""
    prompts = [context + continuation for context, continuation in pairs]
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    response = http.post("/v1/completions", json={"model": MODEL, "prompt": prompts, **fields})
    assert response.status_code == 200, response.text
    return [
        read(choice["logprobs"], len(context))
        for choice, (context, _) in zip(response.json()["choices"], pairs, strict=True)
    ]


def read(logprobs: dict[str, Any], context_length: int) -> Scored:
    """Without the context and without the one token that was generated."""
    own = logprobs["token_logprobs"][context_length:-1]
    tops = logprobs["top_logprobs"][context_length:-1]
    greedy = all(logprob == max(top.values()) for logprob, top in zip(own, tops, strict=True))
    return Scored(math.fsum(own), greedy)


def check(scored: list[Scored], oracle: LlamaForCausalLM, pairs: list[tuple[list[int], list[int]]]) -> None:
    for ours, pair in zip(scored, pairs, strict=True):
        theirs = expected(oracle, *pair)
        assert ours.log_likelihood == pytest.approx(theirs.log_likelihood, abs=TOLERANCE)
        assert ours.is_greedy == theirs.is_greedy


def test_log_likelihoods_as_lm_eval_asks_for_them(
    exact_server: LiveServer, oracle: LlamaForCausalLM, default_model_path: Path
) -> None:
    tokenizer = load_tokenizer(default_model_path).tokenizer
    texts = [halves(SHORT[name]) for name in IN_CI] + [("The capital of France is", " Paris")]
    pairs = [
        (tokenizer.encode(context, add_special_tokens=False), tokenizer.encode(rest, add_special_tokens=False))
        for context, rest in texts
    ]
    with exact_server.http(120) as http:
        cold = over_http(http, pairs)
        warm = over_http(http, pairs)  # what the prefix cache holds must not change anything
    for scored in (cold, warm):  # equal to each other up to rounding: how torch sums depends on the batch
        check(scored, oracle, pairs)
    assert {one.is_greedy for one in cold} == {True, False}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # lm-eval's own are not about us
def test_lm_eval(exact_server: LiveServer, oracle: LlamaForCausalLM, default_model_path: Path, tmp_path: Path) -> None:
    """lm-eval itself: single and batched, with the tokens made here and by its tokenizer."""
    models = pytest.importorskip("lm_eval.models.openai_completions", reason="needs: pip install 'octavo[eval]'")
    tokenizer = AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
    tokenizer.save_pretrained(tmp_path)
    texts = [halves(text) for text in SHORT.values() if len(text) > 3]
    requests = [SimpleNamespace(args=pair) for pair in texts]
    for batch_size in (1, 4):
        model = models.LocalCompletionsAPI(
            model=MODEL,
            base_url=f"{exact_server.base_url}/completions",
            tokenizer=str(tmp_path),
            tokenizer_backend="huggingface",
            batch_size=batch_size,
            max_length=8192,
        )
        scored = [Scored(*pair) for pair in model.loglikelihood(requests)]
        pairs = [model._encode_pair(*pair) for pair in texts]
        check(scored, oracle, pairs)


def test_the_pieces_of_a_text_add_up_to_the_whole(exact_server: LiveServer, default_model_path: Path) -> None:
    """The log-likelihood of a text is the sum over its pieces, each scored behind all before it."""
    ids = load_tokenizer(default_model_path).tokenizer.encode(SHORT["prose"], add_special_tokens=False)
    cuts = [1, 9, 17, 30, len(ids)]
    pieces = [(ids[:begin], ids[begin:end]) for begin, end in pairwise(cuts)]
    with exact_server.http(120) as http:
        [whole, *parts] = over_http(http, [(ids[:1], ids[1:]), *pieces])
    assert math.fsum(part.log_likelihood for part in parts) == pytest.approx(whole.log_likelihood, abs=TOLERANCE)
