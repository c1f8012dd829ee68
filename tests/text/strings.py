"""Generated strings that tokenizers have been seen to get wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence

_PROSE = (
    "The", "quick", "brown", "fox", "jumps", "over", "naïve", "café", "it", "was", "a", "bright", "cold", "day",
    "Straße", "überhaupt", "coöperate", "ΑΒΓ", "мир", "война", "שלום", "مرحبا", "हिन्दी", "ไทย", "İstanbul", "ǅ", "ﬁn",
)  # fmt: skip
_CONTRACTIONS = ("don't", "I'll", "WE'RE", "she'd", "they've", "I'm", "it's", "'tis", "O'NEIL'S", "’s", "y'all'd've")
_CODE = (
    "def f(x: int) -> str:\n    return f'{x!r}'\n", "for (int i = 0; i < n; ++i) {\n\ta[i] += 1;\n}\n",
    "x = {'a': [1, 2]}",
    "SELECT * FROM t WHERE a <> b;", "<div class=\"x\">&nbsp;</div>", "#include <stdio.h>\r\n", "a=b=c;//!?",
    "\\d+\\s*$", "$HOME/.bashrc | grep -v '^#'", "fooBarBaz_qux123", "__init__", "3.14e-10",
    "0xDEADBEEF", "if(x)return;else{y}",
)  # fmt: skip
_DIGITS = ("0", "7", "42", "123", "1234", "3333+777", "1,234,567.89", "2026-11-30", "٣٤٥", "Ⅷ", "½", "x²", "１２３")
_CJK = (
    "你好，世界！",
    "客单价",
    "日本語のテキスト",
    "カタカナ",
    "한국어 문장",
    "漢字かな交じり文",
    "。",
    "　全角",
    "々〆",
)
_EMOJI = ("😀", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "❤️", "🏴‍☠️", "✨", "🦜🔗")
_SPACES = (
    " ",
    "  ",
    "   ",
    "        ",
    " " * 17,
    " " * 40,
    "\t",
    "\t\t",
    " \t ",
    "\u00a0",
    "\u2003",
    "\u200b",
    "\u3000",
)
_NEWLINES = ("\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", " \n", "\n ", "\n\t\n", " \r", "\n" * 9, "  \n  \n", "\u2028")
_MARKS = (
    "e\u0301",
    "a\u0308\u0304",
    "n\u0303",
    "\u0e33",
    "\u1112\u1161\u11ab",
    "\ufeff",
    "\ufffd",
    "Å",
    "\u212b",
    "▁",
    "▁▁",
)
_SYMBOLS = (
    "...",
    "!!!",
    "—",
    "“quoted”",
    "(a)",
    "[b]",
    "{c}",
    "™®©",
    "±∞≠",
    "$5",
    "#tag",
    "@user",
    "~`^|<>=+",
    "_",
    "'",
)

_KINDS: Sequence[Sequence[str]] = (
    _PROSE, _CONTRACTIONS, _CODE, _DIGITS, _CJK, _EMOJI, _SPACES, _NEWLINES, _MARKS, _SYMBOLS,
)  # fmt: skip


def generated_strings(count: int, seed: int, control: Sequence[str] = ()) -> list[str]:
    """`count` strings, each a mixture of a few kinds of text; `control` tokens stand in about one of four."""
    source = random.Random(seed)
    strings = []
    for _ in range(count):
        kinds = [source.choice(_KINDS) for _ in range(source.randint(1, 4))]
        parts: list[str] = []
        for _ in range(source.randint(1, 12)):
            parts.append(source.choice(source.choice(kinds)))
            if source.random() < 0.5:
                parts.append(source.choice((" ", " ", " ", "  ", "\n")))
        if control and source.random() < 0.25:
            parts.insert(source.randrange(len(parts) + 1), source.choice(control))
        if source.random() < 0.1:
            parts.append("".join(chr(source.choice(_RANDOM_CHARACTERS)) for _ in range(source.randint(1, 6))))
        strings.append("".join(parts))
    return strings


_RANDOM_CHARACTERS = [
    *range(0x20, 0x250), *range(0x370, 0x500), *range(0x600, 0x700), *range(0x900, 0x980), *range(0x2000, 0x2070),
    *range(0x3000, 0x3100), *range(0xAC00, 0xAC40), *range(0x1F600, 0x1F640), *range(0x1D400, 0x1D420),
]  # fmt: skip
