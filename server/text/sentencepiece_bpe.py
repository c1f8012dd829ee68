"""SentencePiece BPE vocabularies as `tokenizers` BPE models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

_MARK: Final = "▁"


def build_sentencepiece(
    tokens: Sequence[str],
    scores: Sequence[float],
    *,
    normal_ids: Sequence[int],
    user_defined_ids: Sequence[int],
    unknown_id: int,
    space_prefix: bool,
) -> Backend:
    """A backend that encodes as the SentencePiece model does: merges in the order of scores, bytes where the
    vocabulary has no token, spaces as ▁, and one ▁ before each stretch of text if `space_prefix`.

    User-defined pieces of two or more spaces, stored as spaces, are spelled with ▁ and merged like others, which is
    how the original tokenizers of these vocabularies treat them; the caller adds the other user-defined ones as
    tokens of their own.
    """
    space_runs = [i for i in user_defined_ids if len(tokens[i]) > 1 and not tokens[i].strip(" ")]
    spelled = list(tokens)
    for token_id in space_runs:
        spelled[token_id] = _MARK * len(tokens[token_id])
    ids = {token: index for index, token in enumerate(spelled)}
    if space_runs:  # their scores say nothing; the whole vocabulary is in the order of its merges
        mergeable = sorted([*normal_ids, *space_runs])
    else:
        mergeable = sorted(normal_ids, key=lambda token_id: (-scores[token_id], token_id))
    backend = Backend(
        models.BPE(
            ids,
            _merges(spelled, mergeable),
            unk_token=spelled[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), spaces]) if space_prefix else spaces
    steps = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    return backend


def _merges(tokens: Sequence[str], mergeable: Sequence[int]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece: best piece first, and for one piece by the ids of the parts."""
    ids = {tokens[token_id]: token_id for token_id in mergeable}
    merges: list[tuple[str, str]] = []
    for token_id in mergeable:
        token = tokens[token_id]
        pairs = []
        for cut in range(1, len(token)):
            if (left := token[:cut]) in ids and (right := token[cut:]) in ids:
                pairs.append((left, right))
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += pairs
    return merges
