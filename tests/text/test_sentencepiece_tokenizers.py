"""SentencePiece BPE vocabularies: from GGUF alone, and from a Hugging Face folder, the ids of the algorithm itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import generate_merges

from engine.errors import ModelError
from server.text.loading import load_tokenizer
from server.text.spelling import Leading
from server.text.tokenizer import Tokenizer
from tests.text.strings import generated_strings
from tests.text.tiny import (
    NORMAL,
    Key,
    SentencePieceVocabulary,
    sentencepiece_ids,
    sentencepiece_vocabulary,
    write_folder,
    write_gguf,
)

_VOCABULARY = sentencepiece_vocabulary()
_KEYS: Mapping[str, Key] = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


def _write(path: Path, vocabulary: SentencePieceVocabulary, **keys: Key) -> Path:
    return write_gguf(
        path,
        model="llama",
        tokens=vocabulary.pieces,
        types=vocabulary.types,
        scores=vocabulary.scores,
        keys={**_KEYS, **keys},
    )


def _from_gguf(
    tmp_path: Path, vocabulary: SentencePieceVocabulary = _VOCABULARY, **keys: str | int | bool
) -> Tokenizer:
    return load_tokenizer(_write(tmp_path / "model.gguf", vocabulary, **keys)).tokenizer


@pytest.mark.parametrize("space_prefix", [True, False])
def test_gguf_gives_the_ids_of_the_algorithm(tmp_path: Path, space_prefix: bool) -> None:
    tokenizer = _from_gguf(tmp_path, add_space_prefix=space_prefix)
    texts = generated_strings(400, seed=3)
    for text, ids in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
        assert ids == sentencepiece_ids(_VOCABULARY, text, space_prefix=space_prefix), text


def _hugging_face_backend(vocabulary: SentencePieceVocabulary) -> Backend:
    """As in the tokenizer.json of models that were converted from SentencePiece."""
    ids = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    scores = {
        piece: score
        for piece, score, kind in zip(vocabulary.pieces, vocabulary.scores, vocabulary.types, strict=True)
        if kind == NORMAL
    }
    merges = generate_merges(ids, scores)
    backend = Backend(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def test_folder_and_gguf_give_the_ids_of_the_hugging_face_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", _hugging_face_backend(_VOCABULARY), bos_token="<s>", eos_token="</s>")
    oracle = AutoTokenizer.from_pretrained(folder)
    from_folder, from_gguf = load_tokenizer(folder).tokenizer, _from_gguf(tmp_path)
    assert from_folder.prefix_ids == from_gguf.prefix_ids == (1,)
    texts = generated_strings(400, seed=4, control=("</s>", "<unk>", "</s><s>", " </s> "))
    texts = [text for text in texts if not text.startswith("<s>")]
    for text, a, b in zip(
        texts, from_folder.encode_batch(texts, True), from_gguf.encode_batch(texts, True), strict=True
    ):
        ids = oracle(text)["input_ids"]
        assert a == ids, text
        assert b == ids, text
        for skip in (True, False):
            assert from_gguf.decode(ids, skip) == from_folder.decode(ids, skip)
            assert from_gguf.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_a_text_comes_back_as_it_was(tmp_path: Path) -> None:
    for space_prefix in (True, False):
        tokenizer = _from_gguf(tmp_path, add_space_prefix=space_prefix)
        for text in generated_strings(300, seed=5):
            if "▁" not in text:
                assert tokenizer.decode(tokenizer.encode(text, True), True) == text


def test_pieces_of_characters_that_have_no_token_are_bytes(tmp_path: Path) -> None:
    tokenizer = _from_gguf(tmp_path, add_space_prefix=False)
    ids = tokenizer.encode("🐙", add_special_tokens=False)
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [bytes([byte]) for byte in "🐙".encode()]
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["\\xf0", "\\x9f", "\\x90", "\\x99"]


def test_a_space_before_the_text_is_lost_only_where_the_tokenizer_adds_one(tmp_path: Path) -> None:
    tokenizer = _from_gguf(tmp_path)
    assert tokenizer.leading is Leading.ONE_SPACE
    assert _from_gguf(tmp_path, add_space_prefix=False).leading is Leading.NOTHING


def test_user_defined_pieces_are_found_whole(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary(user_defined=("<b>", "\n\n", "\t"))
    tokenizer = _from_gguf(tmp_path, vocabulary, add_space_prefix=False)
    ids = tokenizer.encode("a<b>\n\n\n\tb", add_special_tokens=False, parse_special=False)
    texts = [tokenizer.token_text(token_id) for token_id in ids]
    assert texts[1:3] == ["<b>", "\n\n"]
    assert "\t" in texts
    assert not tokenizer.is_special(ids[1])
    assert tokenizer.decode(ids, True) == "a<b>\n\n\n\tb"


def test_runs_of_spaces_stored_as_spaces_are_merged_from_marks(tmp_path: Path) -> None:
    runs = tuple(" " * length for length in range(2, 9))
    pieces = ("<unk>", "<s>", "</s>", *runs, "▁", "a", "b")
    vocabulary = SentencePieceVocabulary(
        pieces, (0.0,) * 3 + (-1000.0,) * len(runs) + (-5.0, -6.0, -7.0), (2, 3, 3, *[4] * len(runs), 1, 1, 1)
    )
    tokenizer = _from_gguf(tmp_path, vocabulary, add_space_prefix=False)

    def lengths(text: str) -> list[int]:
        return [len(tokenizer.token_bytes(i)) for i in tokenizer.encode(text, add_special_tokens=False)]

    assert lengths("a  b") == [1, 2, 1]
    assert lengths("a       b") == [1, 7, 1]
    assert lengths("a" + " " * 8 + "b") == [1, 8, 1]
    assert lengths("a" + " " * 16 + "b") == [1, 8, 8, 1]


def test_some_architectures_swallow_white_space_after_control_tokens(tmp_path: Path) -> None:
    strips = _from_gguf(tmp_path, architecture="phi3")
    keeps = _from_gguf(tmp_path)
    assert strips.encode("</s>\n\nx", False) == [2, *keeps.encode("x", False)]
    assert strips.encode("<s>\n\nx", False) == keeps.encode("<s>\n\nx", False)
    assert keeps.encode("</s>\n\nx", False) != strips.encode("</s>\n\nx", False)


def test_bos_is_added_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    assert _from_gguf(tmp_path).encode("a", True)[0] == 1
    assert _from_gguf(tmp_path, add_bos_token=False).encode("a", True)[0] != 1
    assert _from_gguf(tmp_path, add_eos_token=True).encode("a", True)[-1] == 2


def test_a_vocabulary_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    pieces, scores, types = _VOCABULARY.pieces, _VOCABULARY.scores, _VOCABULARY.types
    broken = {
        r"tokens, but \d+ scores": SentencePieceVocabulary(pieces, scores[:-1], types),
        r"tokens, but \d+ token types": SentencePieceVocabulary(pieces, scores, types[:-1]),
        r"the token '<s>' appears twice": SentencePieceVocabulary((*pieces[:-1], "<s>"), scores, types),
    }
    for reason, vocabulary in broken.items():
        with pytest.raises(ModelError, match=rf"model\.gguf: .*{reason}"):
            _from_gguf(tmp_path, vocabulary)
    with pytest.raises(ModelError, match=r"eos_token_id is 99999, but there are"):
        _from_gguf(tmp_path, eos_token_id=99999)
    with pytest.raises(ModelError, match=r"the tokenizer model 't5' is not supported"):
        load_tokenizer(write_gguf(tmp_path / "t5.gguf", model="t5", tokens=["a"], types=[1], keys={}))
