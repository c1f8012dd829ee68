"""langchain-openai: chat, completions and embeddings as LangChain sees them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.conftest import MODEL
from tests.e2e.live import LiveServer

langchain_openai = pytest.importorskip("langchain_openai", reason="needs the extra: pip install 'octavo[conformance]'")
messages = pytest.importorskip("langchain_core.messages")

QUESTION = [("system", "You answer questions."), ("human", "What is the capital of France?")]


@pytest.fixture
def chat(live_server: LiveServer) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=live_server.base_url, api_key="none", model=MODEL, temperature=0, max_tokens=24, max_retries=0
    )


def test_an_answer_with_its_usage(chat: Any) -> None:
    answer = chat.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == MODEL
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert "cache_read" in usage["input_token_details"]


def test_a_stream_adds_up_to_the_answer(chat: Any) -> None:
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    assert len(chunks) > 3
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    answer = chat.invoke(QUESTION)
    assert whole.content == answer.content
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]


async def test_asynchronously_and_in_batches(chat: Any) -> None:
    answers = await chat.abatch([QUESTION, "Say hello."])
    assert "Paris" in answers[0].content
    assert "".join([chunk.content async for chunk in chat.astream(QUESTION)]) == answers[0].content


def test_logprobs_and_stops(chat: Any) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2, stop=["Paris"]).invoke(QUESTION)
    assert answer.content == "The capital of France is "
    content = answer.response_metadata["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [2] * len(content)


def test_several_generations(chat: Any) -> None:
    [generations] = chat.generate([[messages.HumanMessage("Say a word.")]], n=3, temperature=1.0, seed=1).generations
    assert len(generations) == 3


def test_through_the_responses_api(live_server: LiveServer) -> None:
    chat = langchain_openai.ChatOpenAI(
        base_url=live_server.base_url, api_key="none", model=MODEL, temperature=0, max_retries=0, use_responses_api=True
    )
    answer = chat.invoke("What is the capital of France?")
    assert "Paris" in answer.text
    whole = list(chat.stream("What is the capital of France?"))
    assert "".join(chunk.text for chunk in whole) == answer.text


def test_completions(live_server: LiveServer) -> None:
    llm = langchain_openai.OpenAI(
        base_url=live_server.base_url, api_key="none", model=MODEL, temperature=0, max_tokens=8, max_retries=0
    )
    text = llm.invoke("The capital of France is")
    assert "Paris" in text
    assert "".join(llm.stream("The capital of France is")) == text


def test_embeddings(live_server: LiveServer) -> None:
    embeddings = langchain_openai.OpenAIEmbeddings(
        base_url=live_server.base_url, api_key="none", model=MODEL, check_embedding_ctx_length=False, max_retries=0
    )
    [first, second] = embeddings.embed_documents(["A page.", "A leaf."])
    assert first == pytest.approx(embeddings.embed_query("A page."), abs=1e-6)
    assert len(first) == len(second)
