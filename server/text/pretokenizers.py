"""How byte-level BPE vocabularies split a text before merging, by the id that a GGUF file gives
(`tokenizer.ggml.pre`).

The ids are llama.cpp's. The patterns are those of the tokenizer.json of the models that the ids stand for, so
that token ids equal those of the original tokenizers; where llama.cpp's own patterns are approximations, these
are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_WORDS: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*",
)
_CASED_SYMBOLS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_THREE_DIGITS: Final = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_ONE_DIGIT: Final = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_MARKED_WORDS: Final = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN: Final = rf"{_CASED_WORDS[0]}|{_CASED_WORDS[1]}|\p{{N}}|{_CASED_SYMBOLS}|{_SPACES}"
_GPT4O: Final = (
    rf"{_CASED_WORDS[0]}{_CONTRACTION}?|{_CASED_WORDS[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_CASED_SYMBOLS}|{_SPACES}"
)
_BLOOM: Final = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_CASED_LETTERS: Final = (  # of the alphabets that the original pattern lists
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_PUNCTUATION: Final = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_CJK: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK_KANA: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_SPACES}"
)


def _regex(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _bytes_only() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _byte_words() -> PreTokenizer:
    """GPT-2's own splitting, then bytes."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _patterns(*patterns: str) -> tuple[PreTokenizer, ...]:
    return (*map(_regex, patterns), _bytes_only())


@dataclass(frozen=True, slots=True)
class ByteLevelRule:
    """What an id says about a byte-level BPE tokenizer."""

    steps: tuple[PreTokenizer, ...]
    composes: bool = False  # text is brought to Unicode normal form C
    whole_words: bool = False  # a word that is in the vocabulary is its token, whatever the merges say
    adds_bos: bool = False  # unless the file says otherwise

    @property
    def pre_tokenizer(self) -> PreTokenizer:
        return self.steps[0] if len(self.steps) == 1 else pre_tokenizers.Sequence(list(self.steps))

    @property
    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.composes else None


_PLAIN_GPT2: Final = ByteLevelRule((_byte_words(),))
_SINGLE_DIGITS: Final = ByteLevelRule((pre_tokenizers.Digits(individual_digits=True), _byte_words()))
_LLAMA3: Final = ByteLevelRule(_patterns(_THREE_DIGITS), whole_words=True, adds_bos=True)
_CL100K: Final = ByteLevelRule(_patterns(_THREE_DIGITS))
_QWEN2: Final = ByteLevelRule(_patterns(_ONE_DIGIT), composes=True)
_O200K: Final = ByteLevelRule(_patterns(_GPT4O))
_NEOX: Final = ByteLevelRule((_byte_words(),), composes=True)
_BLOOM_RULE: Final = ByteLevelRule(_patterns(_BLOOM))

RULES: Final[Mapping[str, ByteLevelRule]] = {
    "default": ByteLevelRule(_patterns(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "jais": _PLAIN_GPT2,
    "exaone4": _PLAIN_GPT2,
    "gigachat": _PLAIN_GPT2,
    "jina-es": _PLAIN_GPT2,
    "jina-de": _PLAIN_GPT2,
    "jina-v1-en": _PLAIN_GPT2,
    "jina-v2-es": _PLAIN_GPT2,
    "jina-v2-de": _PLAIN_GPT2,
    "jina-v2-code": _PLAIN_GPT2,
    "roberta-bpe": _PLAIN_GPT2,
    "mpt": _NEOX,
    "olmo": _NEOX,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "exaone": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "command-r": ByteLevelRule(_SINGLE_DIGITS.steps, composes=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "jina-v5-nano": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "glm4": _CL100K,
    "chatglm-bpe": _CL100K,
    "qwen2": _QWEN2,
    "stablelm2": ByteLevelRule(_patterns(_ONE_DIGIT)),
    "deepseek-r1-qwen": ByteLevelRule(_patterns(_ONE_DIGIT)),
    "megrez": ByteLevelRule(_patterns(_ONE_DIGIT)),
    "hunyuan": ByteLevelRule(_patterns(_ONE_DIGIT)),
    "qwen35": ByteLevelRule(_patterns(_MARKED_WORDS), composes=True),
    "tekken": ByteLevelRule(_patterns(_TEKKEN), whole_words=True, adds_bos=True),
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "deepseek-llm": ByteLevelRule(
        _patterns("[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?" + _PUNCTUATION, r"\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": ByteLevelRule(_patterns("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": ByteLevelRule(_patterns(r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3)),
    "falcon": ByteLevelRule(
        (
            pre_tokenizers.Punctuation("contiguous"),
            _byte_words(),
            pre_tokenizers.Digits(individual_digits=False),
            _regex("[0-9][0-9][0-9]"),
        )
    ),
    "bloom": _BLOOM_RULE,
    "poro-chat": _BLOOM_RULE,
    "gpt3-finnish": _BLOOM_RULE,
    "viking": ByteLevelRule(_patterns(_BLOOM, r"\p{N}")),
}
