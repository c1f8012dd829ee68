"""/v1/completions: shapes, order, counts."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion

from server.protocol.completions import CompletionResponse
from tests.server.toy import ToyEngine, saying, toy_server, toy_tokenizer

PATH = "/v1/completions"


async def test_an_answer_has_the_shape_of_the_api() -> None:
    async with toy_server(ToyEngine(saying("Hello"), num_cached_tokens=1)) as toy:
        response = await toy.post(PATH, prompt="ab")
    body = response.json()
    Completion.model_validate(body, strict=True)
    CompletionResponse.model_validate(body)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "toy"
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,  # the end of turn is a token
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


async def test_sixteen_tokens_unless_told_otherwise() -> None:
    async with toy_server(ToyEngine(saying("x" * 40))) as toy:
        body = (await toy.post(PATH, prompt="a")).json()
    assert body["choices"][0]["text"] == "x" * 16
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
        (None, [(256,)]),  # the start of a text: this toy's first end token, for want of a BOS
    ],
)
async def test_a_prompt_may_have_four_shapes_or_be_null(prompt: Any, expected: list[tuple[int, ...]]) -> None:
    async with toy_server() as toy:
        response = await toy.post(PATH, prompt=prompt)
    assert response.status_code == 200
    assert [request.prompt_token_ids for request in toy.engine.requests] == expected
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(len(expected)))


async def test_choices_are_ordered_prompt_by_prompt() -> None:
    def script(request: Any, choice: int) -> list[int]:
        return [*request.prompt_token_ids, ord("0") + choice, 258]

    async with toy_server(ToyEngine(script)) as toy:
        body = (await toy.post(PATH, prompt=["a", "b"], n=2)).json()
        streamed = await toy.events(PATH, prompt=["a", "b"], n=2)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "a0"),
        (1, "a1"),
        (2, "b0"),
        (3, "b1"),
    ]
    texts = dict.fromkeys(range(4), "")
    for chunk in streamed:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


async def test_a_stream_is_one_chunk_a_token_then_the_reason_then_done() -> None:
    async with toy_server(ToyEngine(saying("Hi"))) as toy:
        chunks = await toy.events(PATH, prompt="a")
    for chunk in chunks:
        CompletionResponse.model_validate(chunk)
    Completion.model_validate(chunks[-1])  # the client's type has no null reason, which the API sends all the same
    assert [chunk["choices"][0] for chunk in chunks] == [
        {"index": 0, "text": "H", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "i", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"},
    ]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_include_usage_adds_one_chunk_with_the_totals() -> None:
    async with toy_server(ToyEngine(saying("Hi"))) as toy:
        chunks = await toy.events(PATH, prompt="abc", stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == 3
    assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_echo_comes_before_the_answer() -> None:
    async with toy_server(ToyEngine(saying("!"))) as toy:
        body = (await toy.post(PATH, prompt="añb", echo=True)).json()
        chunks = await toy.events(PATH, prompt="añb", echo=True)
    assert body["choices"][0]["text"] == "añb!"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["añb", "!", ""]


async def test_logprobs_are_four_parallel_lists() -> None:
    async with toy_server(ToyEngine(saying("Hi"))) as toy:
        body = (await toy.post(PATH, prompt="ab", logprobs=2, echo=True)).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "H", "i", "<|im_end|>"],
        "token_logprobs": [None, -0.25 - 1 / 1024, -0.25, -0.25 - 1 / 1024, -0.25 - 2 / 1024],
        "top_logprobs": [
            None,
            {"b": -0.25 - 1 / 1024, "c": -1.25 - 1 / 1024},
            {"H": -0.25, "I": -1.25},
            {"i": -0.25 - 1 / 1024, "j": -1.25 - 1 / 1024},
            {"<|im_end|>": -0.25 - 2 / 1024, "\x03": -1.25 - 2 / 1024},
        ],
        "text_offset": [0, 1, 2, 3, 4],
    }


async def test_logprobs_zero_reports_the_chosen_token() -> None:
    async with toy_server(ToyEngine(saying("H"))) as toy:
        body = (await toy.post(PATH, prompt="ab", logprobs=0, max_tokens=1)).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["H"],
        "token_logprobs": [-0.25],
        "top_logprobs": [{"H": -0.25}],
        "text_offset": [0],
    }


async def test_a_part_of_a_character_is_written_as_bytes() -> None:
    async with toy_server(ToyEngine(saying("é"))) as toy:
        body = (await toy.post(PATH, prompt="ab", logprobs=0, max_tokens=2)).json()
    assert body["choices"][0]["text"] == "é"
    assert body["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]


async def test_best_of_returns_the_likeliest_by_mean_logprob() -> None:
    """The toy's later positions are less likely: the shorter the answer, the better its mean."""

    def script(request: Any, choice: int) -> list[int]:
        return [*b"x" * (4 - choice), 258]

    async with toy_server(ToyEngine(script)) as toy:
        body = (await toy.post(PATH, prompt="a", best_of=3, n=2)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "xx"), (1, "xxx")]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 5 + 4 + 3  # all that were drawn


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"stop_token_ids": [259]}, "stop_token_ids"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"priority": 1}, "priority"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"echo": 1}, "echo"),
        ({"user": 5}, "user"),
        ({"request_id": "a b"}, "request_id"),
    ],
)
async def test_a_field_out_of_bounds_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    async with toy_server() as toy:
        response = await toy.post(PATH, {"prompt": "a"} | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param in error["message"]
    assert toy.engine.requests == []


@pytest.mark.parametrize("prompt", [[1.5], [True], {"a": 1}, 5, ["a", 1], [[97], ["a"]]])
async def test_a_prompt_of_another_shape_is_refused(prompt: Any) -> None:
    async with toy_server() as toy:
        response = await toy.post(PATH, prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")


async def test_fill_in_the_middle_where_the_vocabulary_can() -> None:
    tokenizer = toy_tokenizer(fill_token_ids={"prefix": 1, "suffix": 2, "middle": 3})
    async with toy_server(tokenizer=tokenizer) as toy:
        await toy.post(PATH, prompt="ab", suffix="c")
    assert toy.engine.requests[0].prompt_token_ids == (1, 97, 98, 2, 99, 3)


async def test_sampling_fields_reach_the_engine() -> None:
    async with toy_server() as toy:
        await toy.post(
            PATH,
            prompt="abcdef",
            max_tokens=9,
            min_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=-0.4,
            logit_bias={"97": -100, "98": 3.5},
            allowed_token_ids=[97, 98, 97],
            bad_words=["no"],
            seed=-1,
            stop_token_ids=[65],
            truncate_prompt_tokens=4,
            cache_salt="mine",
            n=2,
        )
    request = toy.engine.requests[0]
    sampling = request.sampling
    assert request.prompt_token_ids == (99, 100, 101, 102)
    assert request.seed == 2**64 - 1
    assert request.stop_token_ids == (256, 258, 65)
    assert request.cache_namespace > 0
    assert request.n == 2
    assert (sampling.max_tokens, sampling.min_tokens) == (9, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 0.3, -0.4)
    assert sampling.logit_bias == ((97, -100), (98, 3.5))
    assert sampling.allowed_token_ids == (97, 98)
    assert sampling.bad_words == ((110, 111), (32, 110, 111))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (None, None)


async def test_seeds_are_drawn_for_each_prompt_unless_given() -> None:
    async with toy_server() as toy:
        await toy.post(PATH, prompt=["a", "b"])
        await toy.post(PATH, prompt=["a", "b"], seed=5)
    drawn = [request.seed for request in toy.engine.requests]
    assert drawn[0] != drawn[1]
    assert drawn[2:] == [5, 5]


async def test_ignore_eos_leaves_only_the_requests_own_stop_tokens() -> None:
    async with toy_server() as toy:
        await toy.post(PATH, prompt="a", ignore_eos=True, stop_token_ids=[7])
    assert toy.engine.requests[0].stop_token_ids == (7,)


async def test_token_ids_and_prompt_logprobs_on_request() -> None:
    async with toy_server(ToyEngine(saying("H"))) as toy:
        fields: dict[str, Any] = {"prompt": "ab", "return_token_ids": True, "prompt_logprobs": 1, "max_tokens": 1}
        choice = (await toy.post(PATH, fields)).json()["choices"][0]
        chunks = await toy.events(PATH, **fields)
    assert choice["token_ids"] == [72]
    assert choice["prompt_token_ids"] == [97, 98]
    expected = [None, {"98": {"logprob": -0.25 - 1 / 1024, "rank": 1, "decoded_token": "b"}}]
    assert choice["prompt_logprobs"] == expected
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [97, 98]
    assert chunks[0]["choices"][0]["prompt_logprobs"] == expected
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks[1:]] == [[72], None]


async def test_timings_on_request() -> None:
    async with toy_server(ToyEngine(saying("H"))) as toy:
        body = (await toy.post(PATH, prompt="a", return_timings=True)).json()
        chunks = await toy.events(PATH, prompt="a", return_timings=True)
        header = (await toy.post(PATH, prompt="a")).headers["server-timing"]
    for timings in (body["timings"], chunks[-1]["timings"]):
        assert 0 <= timings["tokenize_seconds"] <= timings["first_token_seconds"] <= timings["total_seconds"]
    assert [part.split(";")[0] for part in header.split(", ")] == ["tokenize", "first-token", "total"]


async def test_the_requests_own_id_names_the_response() -> None:
    async with toy_server() as toy:
        assert (await toy.post(PATH, prompt="a", request_id="job-7")).json()["id"] == "cmpl-job-7"


async def test_unknown_fields_are_named_in_a_header_or_refused() -> None:
    async with toy_server() as toy:
        response = await toy.post(PATH, prompt="a", zeal=1, colour="red")
        assert response.status_code == 200
        assert response.headers["x-ignored-fields"] == "colour, zeal"
        assert "x-ignored-fields" not in (await toy.post(PATH, prompt="a")).headers
    async with toy_server(strict_fields=True) as toy:
        response = await toy.post(PATH, prompt="a", zeal=1)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "zeal"


async def test_more_choices_or_prompts_than_allowed_are_refused() -> None:
    async with toy_server(max_choices=4, max_prompts=3) as toy:
        assert (await toy.post(PATH, prompt=["a", "b"], n=2)).status_code == 200
        assert (await toy.post(PATH, prompt=["a", "b"], n=3)).json()["error"]["param"] == "n"
        assert (await toy.post(PATH, prompt=["a"] * 4)).json()["error"]["param"] == "prompt"


async def test_a_stop_string_is_part_of_the_text_only_on_request() -> None:
    async with toy_server(ToyEngine(saying("one two"))) as toy:
        plain = (await toy.post(PATH, prompt="a", stop="two")).json()["choices"][0]
        kept = (await toy.post(PATH, prompt="a", stop="two", include_stop_str_in_output=True)).json()["choices"][0]
    assert (plain["text"], plain["finish_reason"]) == ("one ", "stop")
    assert (kept["text"], kept["finish_reason"]) == ("one two", "stop")


async def test_a_stop_string_ends_its_own_choice_only() -> None:
    def script(request: Any, choice: int) -> list[int]:
        return [*(b"a|bcd" if choice else b"abcde"), 258]

    async with toy_server(ToyEngine(script)) as toy:
        body = (await toy.post(PATH, prompt="x", n=2, stop="|")).json()
    assert [choice["text"] for choice in body["choices"]] == ["abcde", "a"]
    request_id = toy.engine.requests[0].request_id
    assert toy.engine.aborted == [(request_id, 1)]
    assert body["usage"]["completion_tokens"] == 6 + 2  # what was delivered, the stop's token with it
