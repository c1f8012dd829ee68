"""Byte-level BPE tokenizers, from a Hugging Face folder and from GGUF, give the ids of the Hugging Face tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import ModelError
from server.text.loading import load_tokenizer
from server.text.tokenizer import Tokenizer
from tests.text.strings import generated_strings
from tests.text.tiny import (
    BYTE_LEVEL_CONTROL,
    BYTE_LEVEL_FAMILIES,
    BYTE_LEVEL_USER_DEFINED,
    NORMAL,
    UNUSED,
    ByteLevelFamily,
    byte_level_backend,
    write_byte_level_gguf,
    write_folder,
    write_gguf,
)

_SMOLLM_CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\n", "<repo_name>", "<|im_start")


@pytest.fixture(scope="module")
def smollm(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(default_model_path).tokenizer


def test_default_model_gives_the_ids_of_the_hugging_face_tokenizer(
    smollm: Tokenizer, default_model_oracle: PreTrainedTokenizerFast
) -> None:
    oracle = default_model_oracle
    texts = generated_strings(4500, seed=1, control=_SMOLLM_CONTROL)
    batch = smollm.encode_batch(texts, add_special_tokens=True)
    for text, ids, expected in zip(texts, batch, oracle(texts)["input_ids"], strict=True):
        assert ids == expected, text
        assert smollm.decode(ids, False) == oracle.decode(expected)
        assert smollm.decode(ids, True) == oracle.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("family", BYTE_LEVEL_FAMILIES, ids=lambda family: family.pre)
def test_folder_and_gguf_give_the_ids_of_the_hugging_face_tokenizer(family: ByteLevelFamily, tmp_path: Path) -> None:
    backend = byte_level_backend(family)
    folder = write_folder(tmp_path / "folder", backend, bos_token="<|endoftext|>", eos_token="<|im_end|>")
    file = write_byte_level_gguf(tmp_path / "model.gguf", backend, pre=family.pre, bos_token_id=0, eos_token_id=2)
    oracle = AutoTokenizer.from_pretrained(folder)
    from_folder, from_gguf = load_tokenizer(folder).tokenizer, load_tokenizer(file).tokenizer
    assert from_folder.adds_bos is from_gguf.adds_bos is family.adds_bos
    texts = generated_strings(300, seed=2, control=(*BYTE_LEVEL_CONTROL[1:], *BYTE_LEVEL_USER_DEFINED))
    expected = oracle(texts)["input_ids"]
    for text, ids, a, b in zip(
        texts, expected, from_folder.encode_batch(texts, True), from_gguf.encode_batch(texts, True), strict=True
    ):
        assert a == ids, text
        assert b == ids, text
        assert from_gguf.decode(ids, True) == oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("family", BYTE_LEVEL_FAMILIES[:3], ids=lambda family: family.pre)
def test_control_tokens_are_plain_text_where_they_are_not_parsed(family: ByteLevelFamily, tmp_path: Path) -> None:
    backend = byte_level_backend(family)
    file = write_byte_level_gguf(tmp_path / "model.gguf", backend, pre=family.pre, eos_token_id=2)
    tokenizer = load_tokenizer(file).tokenizer
    text = "a<|im_end|>b<think>c"
    parsed = tokenizer.encode(text, add_special_tokens=False)
    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert tokenizer.token_id("<|im_end|>") in parsed
    assert not any(tokenizer.is_special(token_id) for token_id in plain)
    assert tokenizer.token_id("<think>") in plain  # an added token that is not special is found in any text
    assert tokenizer.decode(plain, False) == tokenizer.decode(parsed, False) == text


def test_padding_of_the_vocabulary_stands_for_nothing(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "model.gguf",
        model="gpt2",
        tokens=["a", "b", "[PAD2]", "ab"],
        types=[NORMAL, NORMAL, UNUSED, NORMAL],
        merges=["a b"],
        keys={"pre": "gpt-2"},
    )
    tokenizer = load_tokenizer(file).tokenizer
    assert tokenizer.vocab_size == 4
    assert tokenizer.decode([2, 0, 2, 1], False) == "ab"
    assert tokenizer.token_bytes(2) == b""


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    """llama.cpp#6920: a file read with the wrong pre-tokenizer loads, and then cannot add numbers."""
    backend = byte_level_backend(BYTE_LEVEL_FAMILIES[0])
    with pytest.raises(ModelError, match=r"model\.gguf: the pre-tokenizer 'made-up' is not known"):
        load_tokenizer(write_byte_level_gguf(tmp_path / "model.gguf", backend, pre="made-up"))
    with pytest.raises(ModelError, match=r"old\.gguf: tokenizer\.ggml\.pre is missing"):
        load_tokenizer(write_byte_level_gguf(tmp_path / "old.gguf", backend))


def test_numbers_split_as_the_models_learned_them(tmp_path: Path) -> None:
    """llama.cpp#6914, #6920: 3333+777."""
    backends = {family.pre: byte_level_backend(family) for family in BYTE_LEVEL_FAMILIES}

    def pieces(pre: str, text: str) -> list[str]:
        backend: Backend = backends[pre]
        tokenizer = load_tokenizer(write_byte_level_gguf(tmp_path / f"{pre}.gguf", backend, pre=pre)).tokenizer
        return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]

    assert pieces("smollm", "3333") == pieces("qwen2", "3333") == ["3", "3", "3", "3"]
    assert len(pieces("llama-bpe", "3333333")) >= 3
    assert not any(len(piece) > 3 for piece in pieces("llama-bpe", "1234123412341234"))
