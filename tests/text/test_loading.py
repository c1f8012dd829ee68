"""What a model's folder or file says about its text side, and how damaged ones are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from engine.errors import ModelError
from server.text.loading import load_tokenizer
from server.text.special_tokens import FillTokens
from tests.text.tiny import (
    BYTE_LEVEL_FAMILIES,
    Key,
    byte_level_backend,
    write_byte_level_gguf,
    write_folder,
)

_FAMILY = next(family for family in BYTE_LEVEL_FAMILIES if family.pre == "llama-bpe")


@pytest.fixture(scope="module")
def backend() -> Backend:
    return byte_level_backend(_FAMILY)


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), "utf-8")


# End of sequence


def test_end_tokens_come_from_every_place_that_lists_them(tmp_path: Path, backend: Backend) -> None:
    """vllm#4180, #5954: a model that ends its turns with a token of generation_config.json must stop there."""
    folder = write_folder(tmp_path, backend, eos_token="<|endoftext|>")
    _json(folder / "config.json", {"eos_token_id": 7, "text_config": {"eos_token_id": [8, 9]}})
    _json(folder / "generation_config.json", {"eos_token_id": [2, 11]})
    # 0 and 2 by the tokenizer's configuration and by their texts too
    assert load_tokenizer(folder).tokenizer.eos_token_ids == (0, 2, 7, 8, 9, 11)


def test_end_tokens_of_a_gguf_file(tmp_path: Path, backend: Backend) -> None:
    file = write_byte_level_gguf(
        tmp_path / "model.gguf", backend, pre="llama-bpe", eos_token_id=40, eot_token_id=41, eom_token_id=42
    )
    assert load_tokenizer(file).tokenizer.eos_token_ids == (0, 2, 40, 41, 42)


def test_end_texts_count_only_where_they_are_special(tmp_path: Path, backend: Backend) -> None:
    copy = Backend.from_str(backend.to_str())
    copy.add_tokens(["</s>", "<end_of_turn>"])
    copy.add_special_tokens(["<|eot_id|>"])
    tokenizer = load_tokenizer(write_folder(tmp_path, copy)).tokenizer
    assert tokenizer.eos_token_ids == (0, 2, copy.token_to_id("<|eot_id|>"))


def test_a_message_end_is_no_turn_end_where_the_vocabulary_has_turn_ends(tmp_path: Path, backend: Backend) -> None:
    copy = Backend.from_str(backend.to_str())
    copy.add_special_tokens(["<|end|>"])
    assert copy.token_to_id("<|end|>") in load_tokenizer(write_folder(tmp_path / "a", copy)).tokenizer.eos_token_ids
    copy.add_special_tokens(["<|return|>", "<|call|>"])
    ends = load_tokenizer(write_folder(tmp_path / "b", copy)).tokenizer.eos_token_ids
    assert copy.token_to_id("<|end|>") not in ends
    assert {copy.token_to_id("<|return|>"), copy.token_to_id("<|call|>")} <= set(ends)


def test_a_converter_may_have_marked_an_end_token_as_an_ordinary_added_one(tmp_path: Path, backend: Backend) -> None:
    copy = Backend.from_str(backend.to_str())
    copy.add_tokens(["<|eot_id|>"])
    tokenizer = load_tokenizer(write_byte_level_gguf(tmp_path / "model.gguf", copy, pre="llama-bpe")).tokenizer
    token_id = copy.token_to_id("<|eot_id|>")
    assert token_id is not None
    assert tokenizer.is_special(token_id)
    assert token_id in tokenizer.eos_token_ids


# Special tokens


def test_named_tokens_are_special_even_if_only_the_configuration_says_so(tmp_path: Path, backend: Backend) -> None:
    word = backend.id_to_token(300)
    folder = write_folder(tmp_path, backend, pad_token={"content": word}, additional_special_tokens=["<think>"])
    tokenizer = load_tokenizer(folder).tokenizer
    think = tokenizer.token_id("<think>")
    assert think is not None
    assert tokenizer.is_special(300)
    assert tokenizer.is_special(think)


def test_added_tokens_that_only_the_configuration_has(tmp_path: Path, backend: Backend) -> None:
    next_id = backend.get_vocab_size(with_added_tokens=True)
    token = {"content": "<new>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    folder = write_folder(tmp_path / "fits", backend, added_tokens_decoder={str(next_id): token})
    tokenizer = load_tokenizer(folder).tokenizer
    assert tokenizer.encode("<new>", False) == [next_id]
    assert tokenizer.is_special(next_id)
    gap = write_folder(tmp_path / "gap", backend, added_tokens_decoder={str(next_id + 5): token})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: token '<new>' is declared with id"):
        load_tokenizer(gap)


def test_fill_in_the_middle_tokens(tmp_path: Path, backend: Backend) -> None:
    assert load_tokenizer(write_folder(tmp_path / "none", backend)).tokenizer.fill_tokens is None
    declared = {"fim_pre_token_id": 50, "fim_suf_token_id": 51, "fim_mid_token_id": 52}
    file = write_byte_level_gguf(tmp_path / "model.gguf", backend, pre="llama-bpe", **declared)
    assert load_tokenizer(file).tokenizer.fill_tokens == FillTokens(50, 51, 52)
    copy = Backend.from_str(backend.to_str())
    copy.add_special_tokens(["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"])
    found = load_tokenizer(write_folder(tmp_path / "text", copy)).tokenizer.fill_tokens
    first = copy.token_to_id("<|fim_prefix|>")
    assert first is not None
    assert found == FillTokens(prefix=first, suffix=first + 2, middle=first + 1)


# Templates and defaults


def test_places_of_chat_templates(tmp_path: Path, backend: Backend) -> None:
    def render(folder: Path, **options: Any) -> str:
        template = load_tokenizer(folder).chat_template
        assert template is not None
        return template.render([], **options)

    assert load_tokenizer(write_folder(tmp_path / "none", backend)).chat_template is None
    folder = write_folder(tmp_path / "places", backend, bos_token="<|endoftext|>")
    _json(folder / "chat_template.json", {"chat_template": "processor {{ bos_token }}"})
    assert render(folder) == "processor <|endoftext|>"
    write_folder(folder, backend, chat_template="config")
    assert render(folder) == "config"
    named = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools"}]
    write_folder(folder, backend, chat_template=named)
    assert render(folder) == "list"
    assert render(folder, tools=[{}]) == "tools"
    (folder / "chat_template.jinja").write_text("file", "utf-8")
    assert render(folder) == "file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("more", "utf-8")
    assert render(folder, tools=[{}]) == "more"


def test_a_gguf_files_template_knows_its_special_tokens(tmp_path: Path, backend: Backend) -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ messages[0].content }}"
    keys: dict[str, Key] = {"bos_token_id": 1, "eos_token_id": 2, "chat_template": template}
    loaded = load_tokenizer(write_byte_level_gguf(tmp_path / "model.gguf", backend, pre="llama-bpe", **keys))
    assert loaded.chat_template is not None
    text = loaded.chat_template.render([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>|<|im_end|>|hi"


def test_sampling_defaults(tmp_path: Path, backend: Backend) -> None:
    folder = write_folder(tmp_path, backend)
    assert load_tokenizer(folder).sampling_defaults == {}
    _json(folder / "generation_config.json", {"temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 2})
    assert load_tokenizer(folder).sampling_defaults == {"temperature": 0.6, "top_k": 20.0}


def test_the_default_model(default_model_path: Path) -> None:
    loaded = load_tokenizer(default_model_path)
    tokenizer = loaded.tokenizer
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (0, 2)
    assert tokenizer.bos_token_id == 1
    assert not tokenizer.adds_bos
    assert loaded.chat_template is not None


# Refusals


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent: no such file or folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"tokenizer\.json: No such file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.json"]
)
@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"{", "no valid JSON"),
        (b"[1]", "holds no JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    ],
)
def test_damaged_configurations_are_named(
    tmp_path: Path, backend: Backend, name: str, contents: bytes, reason: str
) -> None:
    folder = write_folder(tmp_path, backend)
    (folder / name).write_bytes(contents)
    with pytest.raises(ModelError, match=reason) as error:
        load_tokenizer(folder)
    assert str(folder / name) in str(error.value)


def test_absurdly_large_files_are_not_read(tmp_path: Path, backend: Backend) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        folder = write_folder(tmp_path / name, backend)
        with (folder / name).open("r+b") as file:
            file.truncate(1 << 40)  # a sparse file
        with pytest.raises(ModelError, match=rf"{name}: 1048576 MiB; more than \d+ MiB is not read"):
            load_tokenizer(folder)


def test_a_deeply_nested_tokenizer_is_refused(tmp_path: Path, backend: Backend) -> None:
    folder = write_folder(tmp_path, backend)
    state = backend.to_str()
    nested = '{"type":"Sequence","normalizers":[' * 50_000 + "]}" * 50_000
    (folder / "tokenizer.json").write_text(state.replace('"normalizer":null', f'"normalizer":{nested}'), "utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json: no valid tokenizer: recursion limit"):
        load_tokenizer(folder)


def test_a_damaged_tokenizer_never_raises_anything_but_a_model_error(tmp_path: Path, backend: Backend) -> None:
    folder, source = write_folder(tmp_path, backend), random.Random(3)
    state = json.loads(backend.to_str())
    state["model"]["vocab"] = {token: i for token, i in state["model"]["vocab"].items() if i < 270}
    state["model"]["merges"] = state["model"]["merges"][:3]
    whole = json.dumps(state)
    for _ in range(500):
        damaged = list(whole)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(len(damaged))] = source.choice('0123456789{}[]",:nultrue<>s')
        (folder / "tokenizer.json").write_text("".join(damaged), "utf-8")
        try:
            load_tokenizer(folder)
        except ModelError as error:
            assert "tokenizer.json" in str(error)  # noqa: PT017  # most are refused, but not all


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path, backend: Backend) -> None:
    copy = Backend.from_str(backend.to_str())
    copy.decoder = decoders.WordPiece()
    with pytest.raises(
        ModelError, match=r"tokenizer\.json: no valid tokenizer: the decoder WordPiece is not supported"
    ):
        load_tokenizer(write_folder(tmp_path, copy))


def test_a_broken_template_is_refused_at_the_start(tmp_path: Path, backend: Backend) -> None:
    folder = write_folder(tmp_path, backend, chat_template="{% if %}")
    with pytest.raises(ModelError, match="the chat template 'default' is not valid"):
        load_tokenizer(folder)
