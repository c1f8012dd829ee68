"""Constrained requests through the engine process, and through its death."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import jsonschema
import pytest

from engine.client import EngineClient, RequestStream
from engine.config import EngineConfig, FakeOptions, Fault
from engine.constraints.vocabulary import Vocabulary
from engine.recovery import RecoveryOptions
from engine.supervisor import SupervisorOptions
from engine.types import FinishReason, GenerationRequest, SamplingParams
from server.text.tokenizer import Tokenizer
from tests.constraints.conftest import PERSON, by_schema

QUICK = SupervisorOptions(recovery=RecoveryOptions(first_delay_seconds=0.01))


async def start(config: EngineConfig, words: Vocabulary) -> EngineClient:
    client = EngineClient(config, QUICK)
    await client.start()
    await client.wait_ready()
    client.use_vocabulary(words)
    return client


def constrained(client: EngineClient, tokenizer: Tokenizer, n: int = 1) -> GenerationRequest:
    prompt = tokenizer.encode("Describe a person as JSON.", add_special_tokens=False)
    return GenerationRequest(
        client.new_request_id(),
        tuple(prompt),
        SamplingParams(200, temperature=1.0),
        seed=11,
        stop_token_ids=tokenizer.eos_token_ids,
        n=n,
        constraint=by_schema(PERSON),
    )


async def outputs(stream: RequestStream, kill_after: int | None = None, pid: int | None = None) -> list[list[int]]:
    """The tokens of each choice; the engine is killed when so many have come."""
    tokens: dict[int, list[int]] = {k: [] for k in range(stream.request.n)}
    async for updates in stream:
        for update in updates:
            assert update.finish_reason in (None, FinishReason.STOP), update.error
            tokens[update.choice_index] += update.new_token_ids
        if kill_after is not None and pid is not None and sum(map(len, tokens.values())) >= kill_after:
            os.kill(pid, signal.SIGKILL)
            kill_after = None
    return list(tokens.values())


@pytest.mark.parametrize("fast_forward", [False, True])
async def test_the_scripted_executor_follows_grammars_too(
    tokenizer: Tokenizer, words: Vocabulary, fast_forward: bool
) -> None:
    """The same tokens with and without a death in the middle; what it writes is wild, and valid."""
    fake = FakeOptions(vocab_size=49152)
    dying = FakeOptions(vocab_size=49152, faults=(Fault("die", step=9, lives=1),))
    results = []
    for options in (fake, dying):
        config = EngineConfig("", executor="fake", fake=options, fast_forward=fast_forward)
        client = await start(config, words)
        results.append(await outputs(client.submit(constrained(client, tokenizer, n=3))))
        assert client.counters.restarts == (options is dying)
        await client.close()
    assert results[0] == results[1]
    for token_ids in results[0]:
        jsonschema.validate(json.loads(tokenizer.decode(token_ids, skip_special_tokens=False)), PERSON)


async def test_the_default_model_goes_on_where_it_was_killed(
    default_model_path: Path, tokenizer: Tokenizer, words: Vocabulary
) -> None:
    """The new engine is told the tokenizer, rebuilds the matcher from the tokens, and draws the same."""
    config = EngineConfig(str(default_model_path), num_threads=2, kv_cache_memory_bytes=1 << 27, max_model_len=1024)
    client = await start(config, words)
    undisturbed = await outputs(client.submit(constrained(client, tokenizer)))
    again = await outputs(client.submit(constrained(client, tokenizer)), kill_after=8, pid=client.engine_pid)
    assert client.counters.restarts == 1
    await client.close()
    assert again == undisturbed
    jsonschema.validate(json.loads(tokenizer.decode(again[0], skip_special_tokens=False)), PERSON)
