"""Faults that users reported of comparable servers, each closed here by its small input and the right result."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.sse import EventStream
from tests.server.toy import CONTEXT, ToyEngine, saying, toy_server, toy_tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def joined(chunks: list[dict[str, Any]]) -> str:
    texts = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return "".join(texts)


@pytest.mark.parametrize("text", ["😀 客单价", "a\u0301e\u200d👩‍👩‍👧", "naïve café", "\U0001f600" * 5])
async def test_characters_split_over_tokens_arrive_whole(text: str) -> None:
    """Report: replacement characters in CJK and emoji, streamed or not."""
    async with toy_server(ToyEngine(saying(text))) as toy:
        whole = (await toy.post(CHAT, messages=HI)).json()["choices"][0]["message"]["content"]
        chunks = await toy.events(CHAT, messages=HI)
        completion = await toy.events(COMPLETIONS, prompt="a", max_tokens=200)
    assert whole == joined(chunks) == joined(completion) == text
    assert "\ufffd" not in whole


async def test_an_answer_cut_within_a_character_says_so_once() -> None:
    async with toy_server(ToyEngine(saying("a😀"))) as toy:
        whole = (await toy.post(COMPLETIONS, prompt="a", max_tokens=3)).json()["choices"][0]["text"]
        chunks = await toy.events(COMPLETIONS, prompt="a", max_tokens=3)
    assert whole == joined(chunks) == "a\ufffd"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("lo wo", "Hel"),
        (["world", "ell"], "H"),
        ("d!", "Hello worl"),
        ("xyz", "Hello world!"),
        ("H", ""),
        ("!", "Hello world"),
    ],
)
@pytest.mark.parametrize("merges", [(), ("lo", "ll", "wo")])
async def test_stop_strings_across_tokens_never_reach_the_client(
    stop: Any, expected: str, merges: tuple[str, ...]
) -> None:
    """Report: part of a stop string was sent, or it worked only on the edges of tokens."""
    tokenizer = toy_tokenizer(merges)
    tokens = [*tokenizer.encode("Hello world!", add_special_tokens=False), tokenizer.eos_token_ids[-1]]
    async with toy_server(ToyEngine(lambda request, choice: tokens), tokenizer) as toy:
        whole = (await toy.post(COMPLETIONS, prompt="a", stop=stop)).json()["choices"][0]
        chunks = await toy.events(COMPLETIONS, prompt="a", stop=stop)
        chat = await toy.events(CHAT, messages=HI, stop=stop)
    assert whole["text"] == joined(chunks) == joined(chat) == expected
    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""]])
async def test_an_empty_prompt_is_refused_and_hurts_nobody(prompt: Any) -> None:
    """Report: an empty prompt killed the engine of a model without BOS."""
    async with toy_server() as toy:
        response = await toy.post(COMPLETIONS, prompt=prompt)
        after = await toy.post(COMPLETIONS, prompt="a")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert after.status_code == 200


async def test_an_empty_prompt_is_a_prompt_where_bos_makes_it_one() -> None:
    tokenizer = toy_tokenizer(bos_token_id=256, prefix_ids=(256,))
    async with toy_server(tokenizer=tokenizer) as toy:
        assert (await toy.post(COMPLETIONS, prompt="")).status_code == 200
    assert toy.engine.requests[0].prompt_token_ids == (256,)


@pytest.mark.parametrize(
    "bias", [{"99999999": 5}, {"-1": 5}, {"abc": 1}, {"259": 1}, {"1": 101}, {"1e1": 1}, {"٣": 1}, {"9" * 5000: 1}]
)
async def test_logit_bias_outside_of_the_vocabulary_is_refused(bias: dict[str, float]) -> None:
    """Report: an id beyond the vocabulary crashed the engine."""
    async with toy_server() as toy:
        response = await toy.post(COMPLETIONS, prompt="a", logit_bias=bias)
        largest = await toy.post(COMPLETIONS, prompt="a", logit_bias={"258": 100, "0": -100})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logit_bias"
    assert largest.status_code == 200


async def test_logprobs_are_finite_numbers_always() -> None:
    """Report: −inf after masking made the answer no valid JSON."""

    def numbers(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [number for item in value.values() for number in numbers(item)]
        if isinstance(value, list):
            return [number for item in value for number in numbers(item)]
        return [value] if isinstance(value, float) else []

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in the answer")

    async with toy_server() as toy:
        for fields in ({"prompt": "a"}, {"prompt": "abc", "echo": True}):
            response = await toy.post(COMPLETIONS, fields | {"logprobs": 5, "top_k": 1})
            body = json.loads(response.text, parse_constant=refuse)
            found = numbers(body["choices"][0]["logprobs"])
            assert found
            assert all(math.isfinite(number) for number in found)


async def test_bos_stands_once() -> None:
    """Report: the template wrote BOS and the tokenizer added another."""
    tokenizer = toy_tokenizer(bos_token_id=257, prefix_ids=(257,))
    async with toy_server(tokenizer=tokenizer) as toy:
        chat = (await toy.post(CHAT, messages=HI, return_token_ids=True)).json()
        again = (await toy.post(CHAT, messages=HI, return_token_ids=True, add_special_tokens=True)).json()
        rendered = (await toy.post("/v1/chat/completions/render", messages=HI)).json()["prompt"]
        raw = (await toy.post(COMPLETIONS, prompt=rendered, return_token_ids=True)).json()
        plain = (await toy.post(COMPLETIONS, prompt="hi", return_token_ids=True)).json()
    assert chat["prompt_token_ids"][:2] == [257, ord("u")]  # <|im_start|> is this toy's BOS
    assert again["prompt_token_ids"] == raw["choices"][0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert plain["choices"][0]["prompt_token_ids"] == [257, ord("h"), ord("i")]


async def test_every_listed_end_token_ends_the_answer_without_text() -> None:
    """Report: the end of a turn was not an end, or ignore_eos broke with it."""
    tokenizer = toy_tokenizer(eos_token_ids=[2, 7])
    for end in (2, 7, 256, 258):

        def script(request: Any, choice: int, end: int = end) -> list[int]:
            return [65, end, 66]

        async with toy_server(ToyEngine(script), tokenizer) as toy:
            body = (await toy.post(COMPLETIONS, prompt="a", max_tokens=3)).json()
            ignored = (await toy.post(COMPLETIONS, prompt="a", max_tokens=3, ignore_eos=True)).json()
        assert body["choices"][0] | {"logprobs": 0} == {"index": 0, "text": "A", "logprobs": 0, "finish_reason": "stop"}
        assert ignored["choices"][0]["finish_reason"] == "length"
        assert ignored["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("length", "room"), [(CONTEXT + 44, 0), (CONTEXT, 0), (CONTEXT - 1, 1)])
@pytest.mark.parametrize("max_tokens", [None, 1, 50])
async def test_a_prompt_at_the_edge_of_the_context(length: int, room: int, max_tokens: int | None) -> None:
    """Report: "max_tokens must be at least 1, got −186", or a 500."""
    fields = {"prompt": "x" * length} | ({} if max_tokens is None else {"max_tokens": max_tokens})
    async with toy_server(ToyEngine(saying("Hello"))) as toy:
        response = await toy.post(COMPLETIONS, fields)
        chat = await toy.post(CHAT, messages=[{"role": "user", "content": "x" * length}])
    if room and max_tokens in (None, 1):
        assert response.json()["usage"]["completion_tokens"] == 1
    else:
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "-" not in error["message"]
        assert f"{length}" in error["message"]
    assert chat.status_code == 400
    assert chat.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


async def test_usage_and_indexes_of_a_stream_with_choices_of_different_lengths() -> None:
    """Report: per-step lengths were added as if new, and the last chunk of a choice had index 0."""

    def script(request: Any, choice: int) -> list[int]:
        return [*b"abcdefg"[: 3 + 2 * choice], 258]

    for path, fields in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        async with toy_server(ToyEngine(script)) as toy:
            options = {"n": 3, "stream_options": {"include_usage": True}, "return_token_ids": True}
            chunks = await toy.events(path, **fields, **options)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        finished = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
        tokens = [token for choice in choices for token in choice.get("token_ids", [])]
        assert finished == [0, 1, 2]
        assert chunks[-1]["usage"]["completion_tokens"] == len(tokens) == 4 + 6 + 8


async def test_each_route_has_its_own_form_of_logprobs() -> None:
    """Report: chat returned the legacy form."""
    async with toy_server(ToyEngine(saying("Hi"))) as toy:
        chat = (await toy.post(CHAT, messages=HI, logprobs=True, top_logprobs=2)).json()
        chat_chunks = await toy.events(CHAT, messages=HI, logprobs=True, top_logprobs=2)
        legacy = (await toy.post(COMPLETIONS, prompt="a", logprobs=2)).json()
        legacy_chunks = await toy.events(COMPLETIONS, prompt="a", logprobs=2)
    parsed = ChatCompletion.model_validate(chat, strict=True)
    assert parsed.choices[0].logprobs is not None
    assert [token.token for token in parsed.choices[0].logprobs.content or ()] == ["H", "i", "<|im_end|>"]
    streamed = [
        token.token
        for chunk in chat_chunks
        for choice in ChatCompletionChunk.model_validate(chunk, strict=True).choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or ()
    ]
    assert streamed == ["H", "i", "<|im_end|>"]
    completion = Completion.model_validate(legacy, strict=True)
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.tokens == ["H", "i", "<|im_end|>"]
    assert [
        token for chunk in legacy_chunks for token in (chunk["choices"][0]["logprobs"] or {"tokens": []})["tokens"]
    ] == [
        "H",
        "i",
        "<|im_end|>",
    ]


async def test_text_offsets_of_a_stream_with_echo_go_on_from_the_prompt() -> None:
    """Report: offsets were too small by the length of the prompt."""
    fields: dict[str, Any] = {"prompt": "prompt", "echo": True, "logprobs": 0, "max_tokens": 6}
    async with toy_server(ToyEngine(saying("answer"))) as toy:
        whole = (await toy.post(COMPLETIONS, fields)).json()["choices"][0]["logprobs"]
        chunks = await toy.events(COMPLETIONS, **fields)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    offsets = [offset for part in parts if part for offset in part["text_offset"]]
    assert offsets == whole["text_offset"] == list(range(12))
    assert [token for part in parts if part for token in part["tokens"]] == whole["tokens"]


async def test_echo_with_no_tokens_returns_the_prompt_and_its_logprobs() -> None:
    """Report: echo with max_tokens 0 crashed."""
    async with toy_server() as toy:
        body = (await toy.post(COMPLETIONS, prompt="abcd", echo=True, max_tokens=0, logprobs=1)).json()
        chunks = await toy.events(COMPLETIONS, prompt="abcd", echo=True, max_tokens=0, logprobs=1)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert all(isinstance(number, float) for number in choice["logprobs"]["token_logprobs"][1:])
    assert body["usage"]["completion_tokens"] == 0
    assert joined(chunks) == "abcd"
    assert chunks[0]["choices"][0]["logprobs"] == choice["logprobs"]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "nonsense"},
        {"type": "regex", "regex": "(unclosed"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["x" * 1000] * 1000}}},
        {},
        {"type": None},
    ],
)
async def test_a_bad_response_format_is_refused(form: dict[str, Any]) -> None:
    """Report: a bad regex or schema killed the server."""
    async with toy_server() as toy:
        response = await toy.post(CHAT, messages=HI, response_format=form)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"


async def test_response_objects_do_not_stay_in_memory() -> None:
    """Report: objects of streams that were cut off stayed for ever."""
    async with toy_server(ToyEngine(saying("x" * 20))) as toy:
        for number in range(400):
            await _one_stream(toy.app, leave_after=None if number % 2 else 3)
        await asyncio.sleep(0)
        gc.collect()
        # type(), not isinstance(): that asks every object for its __class__, and some warn when asked
        alive = [thing for thing in gc.get_objects() if type(thing) is EventStream]
        assert alive == []
        assert toy.server.admission.num_active == 0
        assert toy.engine.open == {}


async def _one_stream(app: Any, leave_after: int | None) -> None:
    """A streamed completion; the client leaves after so many messages."""
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 30}).encode()
    gone, asked, num_messages = asyncio.Event(), False, 0

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal num_messages
        num_messages += 1
        if num_messages == leave_after:
            gone.set()
        await asyncio.sleep(0)

    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "raw_path": COMPLETIONS.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("toy", 80),
    }
    await app(scope, receive, send)
    assert (num_messages < 20) == (leave_after is not None)


async def test_a_stream_has_lf_line_ends_and_comments_only() -> None:
    """Report: clients choked on CRLF, named pings and ids."""
    async with toy_server(ToyEngine(saying("a\r\nb\n\n\u2028c"))) as toy:
        response: httpx.Response = await toy.post(COMPLETIONS, prompt="a", stream=True)
    assert b"\r" not in response.content
    for block in response.content.removesuffix(b"\n\n").split(b"\n\n"):
        assert block.startswith((b"data: ", b": "))
        assert b"\n" not in block
