"""Tiny tokenizers of the families people run, trained here, written as a Hugging Face folder and as GGUF."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import PreTokenizer

from tests.text.strings import generated_strings

Key = str | int | bool

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CORPUS = generated_strings(400, seed=11)


def _split(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_gpt2() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# As in the tokenizer.json of the models named.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class ByteLevelFamily:
    """How one family splits text; `pre` is its id in GGUF files."""

    pre: str
    pre_tokenizer: PreTokenizer
    composes: bool = False
    whole_words: bool = False
    adds_bos: bool = False


BYTE_LEVEL_FAMILIES = (
    ByteLevelFamily("gpt-2", _gpt2()),
    ByteLevelFamily("phi-2", _gpt2()),
    ByteLevelFamily("smollm", _digits_gpt2()),
    ByteLevelFamily("starcoder", _digits_gpt2()),
    ByteLevelFamily("refact", _digits_gpt2()),
    ByteLevelFamily("command-r", _digits_gpt2(), composes=True),
    ByteLevelFamily("olmo", _gpt2(), composes=True),
    ByteLevelFamily("llama-bpe", _split(_LLAMA3), whole_words=True, adds_bos=True),
    ByteLevelFamily("dbrx", _split(_LLAMA3)),
    ByteLevelFamily("smaug-bpe", _split(_LLAMA3)),
    ByteLevelFamily("qwen2", _split(_QWEN2), composes=True),
    ByteLevelFamily("tekken", _split(_TEKKEN), whole_words=True, adds_bos=True),
    ByteLevelFamily("gpt-4o", _split(_O200K)),
    ByteLevelFamily(
        "falcon",
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),
                _gpt2(),
                pre_tokenizers.Digits(individual_digits=False),
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        ),
    ),
    ByteLevelFamily(
        "deepseek-coder",
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex("[\r\n]"), "isolated"),
                pre_tokenizers.Split(Regex(r"\s?\p{L}+"), "isolated"),
                pre_tokenizers.Split(Regex(r"\s?\p{P}+"), "isolated"),
                pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-\ud7ff]+"), "isolated"),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    ),
)

BYTE_LEVEL_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜User｜>")
BYTE_LEVEL_USER_DEFINED = ("<think>", "    ")


def byte_level_backend(family: ByteLevelFamily) -> Tokenizer:
    """A trained byte-level BPE tokenizer as a Hugging Face tokenizer.json would hold it."""
    backend = Tokenizer(models.BPE(ignore_merges=family.whole_words))
    if family.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = family.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in BYTE_LEVEL_CONTROL],
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in BYTE_LEVEL_USER_DEFINED])
    if family.adds_bos:
        bos = BYTE_LEVEL_CONTROL[0]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    return backend


def write_folder(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    """tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


def write_gguf(
    path: Path,
    *,
    model: str,
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    keys: Mapping[str, Key],
) -> Path:
    """A GGUF file that holds a tokenizer and nothing else; `keys` go under `tokenizer.ggml.`, but `architecture` and
    `chat_template` where they belong."""
    keys = dict(keys)
    writer = gguf.GGUFWriter(path, str(keys.pop("architecture", "llama")))
    if (template := keys.pop("chat_template", None)) is not None:
        writer.add_chat_template(str(template))
    writer.add_tokenizer_model(model)
    writer.add_array("tokenizer.ggml.tokens", list(tokens))
    writer.add_array("tokenizer.ggml.token_type", list(types))
    if merges is not None:
        writer.add_array("tokenizer.ggml.merges", list(merges))
    if scores is not None:
        writer.add_array("tokenizer.ggml.scores", list(scores))
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_level_gguf(path: Path, backend: Tokenizer, **keys: Key) -> Path:
    """The same tokenizer as GGUF; `pre` is to be among the keys."""
    state = json.loads(backend.to_str())
    ids = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    types = [NORMAL] * len(tokens)
    for token in state["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = [" ".join(merge) for merge in state["model"]["merges"]]
    return write_gguf(path, model="gpt2", tokens=tokens, types=types, merges=merges, keys=keys)


@dataclass(frozen=True)
class SentencePieceVocabulary:
    """Pieces of a SentencePiece BPE model with their scores and kinds."""

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]


def sentencepiece_vocabulary(user_defined: Sequence[str] = ()) -> SentencePieceVocabulary:
    """Trained on the same corpus; not every character has a piece, so that bytes are needed."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*|[^▁]+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=900, limit_alphabet=120, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    ids = backend.get_vocab()
    characters = sorted(token for token in ids if len(token) == 1)
    merged = sorted((token for token in ids if len(token) > 1), key=ids.__getitem__)
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *user_defined]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[USER_DEFINED] * len(user_defined)]
    scores = [0.0] * len(pieces)
    for rank, piece in enumerate([*merged, *characters]):
        if piece not in user_defined:
            pieces.append(piece)
            types.append(NORMAL)
            scores.append(-float(rank))
    return SentencePieceVocabulary(tuple(pieces), tuple(scores), tuple(types))


def sentencepiece_ids(vocabulary: SentencePieceVocabulary, text: str, *, space_prefix: bool) -> list[int]:
    """SentencePiece's BPE, word for word: join the neighbours whose piece has the best score, leftmost first, until
    none are left; what has no piece becomes bytes. No user-defined pieces."""
    scores = {
        piece: score
        for piece, score, kind in zip(vocabulary.pieces, vocabulary.scores, vocabulary.types, strict=True)
        if kind == NORMAL
    }
    ids = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    parts = list((" " + text if space_prefix and text else text).replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in scores
        ]
        if not pairs:
            break
        _, best = min(pairs)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in scores else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found
