"""The tokenizer's contract: special tokens, BOS, the vocabulary, threads."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from server.text.tokenizer import Tokenizer
from tests.text.strings import generated_strings
from tests.text.tiny import BYTE_LEVEL_FAMILIES, byte_level_backend


@pytest.fixture(scope="module")
def with_bos() -> Tokenizer:
    family = next(family for family in BYTE_LEVEL_FAMILIES if family.adds_bos)
    return Tokenizer(byte_level_backend(family), bos_token_id=0, eos_token_ids=[2])


def test_bos_is_never_added_twice(with_bos: Tokenizer) -> None:
    """vllm#9519, #16853; sglang#888: a chat template writes BOS, and so would the tokenizer."""
    once = with_bos.encode("cold day", add_special_tokens=True)
    assert once[0] == with_bos.bos_token_id
    assert with_bos.encode("<|endoftext|>cold day", add_special_tokens=True) == once
    assert with_bos.encode("<|endoftext|>cold day", add_special_tokens=False) == once
    assert with_bos.encode("cold day", add_special_tokens=False) == once[1:]


def test_bos_in_a_text_that_is_not_parsed_is_text(with_bos: Tokenizer) -> None:
    ids = with_bos.encode("<|endoftext|>cold", add_special_tokens=True, parse_special=False)
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert with_bos.decode(ids[1:], False) == "<|endoftext|>cold"


def test_an_empty_text_may_have_no_tokens(byte_level: Tokenizer, with_bos: Tokenizer) -> None:
    """vllm#7746, #7632: GPT-2's tokenizer adds nothing, so an empty prompt has no token at all."""
    assert byte_level.encode("", add_special_tokens=True) == []
    assert with_bos.encode("", add_special_tokens=True) == [0]
    assert byte_level.decode([], False) == ""


def test_a_suffix_is_added_once() -> None:
    backend = Backend(models.BPE({"a": 0, "<s>": 1, "</s>": 2}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = Tokenizer(backend, bos_token_id=1)
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == ((1,), (2,))
    assert tokenizer.encode("aa", add_special_tokens=True) == [1, 0, 0, 2]
    assert tokenizer.encode("<s>aa</s>", add_special_tokens=True) == [1, 0, 0, 2]


def test_truncation_and_padding_of_the_file_do_not_apply() -> None:
    backend = byte_level_backend(BYTE_LEVEL_FAMILIES[0])
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer(backend)
    text = "The quick brown fox jumps over"
    assert tokenizer.decode(tokenizer.encode(text, True), True) == text


def test_token_bytes_join_to_the_text(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for text in generated_strings(200, seed=8):
        ids = byte_level.encode(text, add_special_tokens=False)
        assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()
        if "▁" not in text:
            ids = sentencepiece.encode(text, add_special_tokens=False)
            assert b"".join(map(sentencepiece.token_bytes, ids)) == f" {text}".encode()


def test_token_texts_are_text_or_escapes(byte_level: Tokenizer) -> None:
    assert byte_level.token_text(2) == "<|im_end|>"
    half = byte_level.token_id("Ċ")
    high = byte_level.token_id("ð")
    assert half is not None
    assert high is not None
    assert byte_level.token_text(half) == "\n"
    assert byte_level.token_text(high) == "\\xf0"
    assert byte_level.token_text(10**6) == ""


def test_control_tokens_are_special_and_added_words_are_not(byte_level: Tokenizer) -> None:
    think = byte_level.token_id("<think>")
    assert think is not None
    assert byte_level.is_special(2)
    assert not byte_level.is_special(think)
    assert not byte_level.is_special(300)
    assert byte_level.decode([2, think], True) == "<think>"


def test_plain_text_keeps_ids_that_have_gaps() -> None:
    backend = Backend(models.BPE({"a": 0, "<": 1, ">": 2, "s": 3, "x": 9}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer = Tokenizer(backend)
    special = tokenizer.encode("a<s>x", False)[1]
    assert tokenizer.is_special(special)
    assert tokenizer.encode("a<s>x", False, parse_special=False) == [0, 1, 3, 2, 9]


def test_half_a_surrogate_pair_is_a_value_error(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        byte_level.encode("a\ud800b", add_special_tokens=False)


def test_text_that_the_patterns_give_up_on_is_a_value_error() -> None:
    backend = Backend(models.BPE({"a": 0}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    backend.decoder = decoders.ByteLevel()
    with pytest.raises(ValueError, match="cannot be split into tokens"):
        Tokenizer(backend).encode(" " * 12_000_000 + "x", add_special_tokens=False)


def test_threads_get_the_same_ids(with_bos: Tokenizer) -> None:
    texts = generated_strings(200, seed=9, control=("<|im_end|>",))
    expected = [(with_bos.encode(text, True), with_bos.encode(text, True, parse_special=False)) for text in texts]

    def encode(text: str) -> tuple[list[int], list[int]]:
        return with_bos.encode(text, True), with_bos.encode(text, True, parse_special=False)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(encode, texts)) == expected


def test_encoding_gives_the_interpreter_away(byte_level: Tokenizer) -> None:
    """vllm#24910: tokenising a long prompt in a thread must not stop the event loop."""
    text = "The quick brown fox. " * 60_000
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(byte_level.encode, text, False)
        turns = 0
        while not future.done():
            turns += 1  # holds the interpreter between turns, as an event loop does
    assert len(future.result()) > 100_000
    assert turns > 1000


def test_the_serialised_form_is_a_tokenizer_json(byte_level: Tokenizer) -> None:
    backend = Backend.from_str(byte_level.serialized().decode())
    text = "don't 你好 <|im_end|>"
    assert backend.encode(text, add_special_tokens=False).ids == byte_level.encode(text, add_special_tokens=False)


def test_importing_the_text_side_loads_no_torch() -> None:
    code = "import sys, server.text.loading, server.text.output; print({'torch', 'transformers'} & sys.modules.keys())"
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
