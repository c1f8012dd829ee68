"""Pieces that the wire shapes of several endpoints share, as plain JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import TokenLogprobs
from server.generation import Usage
from server.protocol.common import JsonObject
from server.structured.parser import AnswerSyntax
from server.text.output import LogprobEntry, ReportedToken
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every chunk of a response repeats."""

    id: str
    created: int  # Unix seconds
    model: str
    fingerprint: str

    def fields(self, kind: str) -> JsonObject:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(frozen=True, slots=True)
class Timings:
    """Of one request, in seconds since it arrived."""

    tokenize_seconds: float
    first_token_seconds: float | None
    total_seconds: float

    def fields(self) -> JsonObject:
        return {
            "tokenize_seconds": self.tokenize_seconds,
            "first_token_seconds": self.first_token_seconds,
            "total_seconds": self.total_seconds,
        }

    def header(self) -> str:
        """As `Server-Timing`, in milliseconds."""
        entries = [f"tokenize;dur={self.tokenize_seconds * 1e3:.1f}"]
        if self.first_token_seconds is not None:
            entries.append(f"first-token;dur={self.first_token_seconds * 1e3:.1f}")
        return ", ".join([*entries, f"total;dur={self.total_seconds * 1e3:.1f}"])


def num_reasoning_tokens(syntax: AnswerSyntax | None, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Those of a whole answer that are its reasoning."""
    if syntax is None or syntax.reasoning is None:
        return 0
    parser, count = syntax.parser(), 0
    for token_id in token_ids:
        parser.feed(tokenizer.token_bytes(token_id).decode("utf-8", "replace"))
        if parser.in_reasoning:
            count += 1
        elif count:
            break
    return count


def usage_fields(usage: Usage, reasoning_tokens: int = 0) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def is_whole(token: ReportedToken) -> bool:
    """Whether a token's bytes are whole characters."""
    try:
        token.utf8.decode()
    except UnicodeDecodeError:
        return False
    return True


def legacy_text(token: ReportedToken) -> str:
    """A token as legacy logprobs write it: bytes:\\xf0\\x9f for a part of a character."""
    return token.text if is_whole(token) else f"bytes:{token.text}"


def legacy_logprobs(entries: Sequence[LogprobEntry], num_top: int) -> JsonObject:
    """Four parallel lists; each map of alternatives holds the token itself, too."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.token.logprob is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token in (*entry.top[:num_top], entry.token):
            if token.logprob is not None:
                top.setdefault(legacy_text(token), token.logprob)
        tops.append(top)
    return {
        "tokens": [legacy_text(entry.token) for entry in entries],
        "token_logprobs": [entry.token.logprob for entry in entries],
        "top_logprobs": tops,
        "text_offset": [entry.text_offset for entry in entries],
    }


def chat_logprobs(entries: Sequence[LogprobEntry], num_top: int) -> JsonObject:
    """One object a token, with its true bytes."""
    return {
        "content": [
            {**_chat_token(entry.token), "top_logprobs": [_chat_token(token) for token in entry.top[:num_top]]}
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(token: ReportedToken) -> JsonObject:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}


def prompt_logprobs(
    reported: Sequence[TokenLogprobs | None], num_top: int, tokenizer: Tokenizer
) -> list[JsonObject | None]:
    """Per position of the prompt, candidates by token id; null for the first."""
    return [None if position is None else _candidates(position, num_top, tokenizer) for position in reported]


def _candidates(position: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> JsonObject:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(position.top[:num_top], 1)]
    own = (position.token_id, position.logprob, position.rank)
    return {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        for token_id, logprob, rank in [*ranked, own]
    }
