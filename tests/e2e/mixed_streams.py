"""Thirty-two streams of all kinds against a server, and what came out of them to compare."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOPICS = ("the sea", "a paper mill", "winter", "two brothers", "an old map", "the last train", "bread", "a lighthouse")


@dataclass(frozen=True)
class Stream:
    """One request; `body` lacks only `stream`."""

    path: str
    body: dict[str, Any]


@dataclass
class Choice:
    """All that a client has seen of a choice."""

    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


Answer = dict[int, Choice]


def mixed_streams(count: int, max_tokens: int, seed: int = 0) -> list[Stream]:
    """Greedy and seeded; some with several choices, stops, logprobs, penalties, bias; completions and chat."""
    rng = random.Random(seed)
    streams = []
    for number in range(count):
        topic = TOPICS[number % len(TOPICS)]
        body: dict[str, Any] = {"max_tokens": rng.randint(max_tokens // 2, max_tokens), "temperature": 0.0}
        if number % 2:
            body |= {"temperature": 1.0, "seed": number, "top_p": 0.95}
        if number % 4 == 1:
            body |= {"n": 2 + number % 3 // 2}
        if number % 5 == 0:
            body |= {"stop": ["\n\n", " the end"]}
        if number % 6 == 3:
            body |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1}
        if number % 7 == 2:
            body |= {"logit_bias": {"260": -5}, "min_tokens": 4}
        if number % 3 == 0:
            body |= {"messages": [{"role": "user", "content": f"Tell me a story about {topic}."}]}
            if number % 4 == 0:
                body |= {"logprobs": True, "top_logprobs": 2}
            streams.append(Stream(CHAT, body))
        else:
            body |= {"prompt": f"Chapter {number}. It was a story about {topic}, and it began"}
            if number % 4 == 0:
                body |= {"logprobs": 2}
            streams.append(Stream(COMPLETIONS, body))
    return streams


async def read(http: httpx.AsyncClient, stream: Stream, on_chunk: Callable[[], None]) -> Answer:
    """Read a stream to its [DONE]; anything else fails."""
    answer: Answer = {}
    async with http.stream("POST", stream.path, json=stream.body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        done = False
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            assert not done
            data = line.removeprefix("data: ")
            done = data == "[DONE]"
            if not done:
                _take(answer, json.loads(data))
                on_chunk()
        assert done, "the stream ended early"
    assert all(choice.finish_reason for choice in answer.values())
    assert sorted(answer) == list(range(stream.body.get("n", 1)))
    return answer


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    assert "error" not in chunk, chunk
    for part in chunk["choices"]:
        choice = answer.setdefault(part["index"], Choice())
        assert choice.finish_reason is None
        delta = part.get("delta")
        choice.text += (delta.get("content") or "") if delta is not None else part["text"]
        if part.get("logprobs"):
            choice.logprobs.append(part["logprobs"])
        choice.finish_reason = part["finish_reason"]


async def read_all(
    http: httpx.AsyncClient, streams: list[Stream], on_chunk: Callable[[], None] = lambda: None
) -> list[Answer]:
    """All at once."""
    return await asyncio.gather(*[read(http, stream, on_chunk) for stream in streams])
