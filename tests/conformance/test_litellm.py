"""litellm, which sits in front of many servers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tests.conformance.conftest import MODEL
from tests.e2e.live import LiveServer

# Its own warnings are not about us.
pytestmark = pytest.mark.filterwarnings("ignore")
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def litellm() -> Any:
    """Imported without asking the network for the prices of other people's models."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        module = pytest.importorskip("litellm", reason="needs the extra: pip install 'octavo[conformance]'")
    module.telemetry = False
    return module


@pytest.fixture
def where(live_server: LiveServer) -> dict[str, Any]:
    return {"api_base": live_server.base_url, "api_key": "none", "max_retries": 0}


def test_chat(litellm: Any, where: dict[str, Any]) -> None:
    fields = {"model": f"openai/{MODEL}", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, **where}
    answer = litellm.completion(**fields)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **fields))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.usage.completion_tokens == answer.usage.completion_tokens
    assert built.choices[0].finish_reason == "stop"


async def test_chat_asynchronously(litellm: Any, where: dict[str, Any]) -> None:
    fields = {"model": f"openai/{MODEL}", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, **where}
    answer = await litellm.acompletion(**fields)
    stream = await litellm.acompletion(stream=True, **fields)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == answer.choices[0].message.content


def test_completions(litellm: Any, where: dict[str, Any]) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="The capital of France is",
        temperature=0,
        max_tokens=8,
        logprobs=1,
        **where,
    )
    assert "Paris" in answer.choices[0].text
    assert len(answer.choices[0].logprobs.token_logprobs) == 8


def test_embeddings(litellm: Any, where: dict[str, Any]) -> None:
    answer = litellm.embedding(model=f"openai/{MODEL}", input=["A page.", "A leaf."], **where)
    assert [len(item["embedding"]) for item in answer.data] == [576, 576]


def test_errors_become_its_own(litellm: Any, where: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, temperature=9, **where)
    long = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model=f"openai/{MODEL}", messages=long, **where)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/gpt-9", messages=MESSAGES, **where)
