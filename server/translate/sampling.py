"""Sampling fields → SamplingParams, with every limit that the vocabulary, the context and the operator set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import TypeVar

from engine.types import SamplingParams
from server.errors import ContextTooLong, InvalidRequest, NotSupported
from server.plan import ModelText, Prompt
from server.protocol.common import SamplingFields, StreamOptions
from server.settings import Settings
from server.text.tokenizer import Tokenizer

Value = TypeVar("Value")
SeedSource = Callable[[], int]  # draws 64 bits
_MAX_SEED = 2**64 - 1


def sampling_params(
    body: SamplingFields, model: ModelText, *, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """The parameters of a request; max_tokens is 0 here, as it depends on the prompt. Raises InvalidRequest."""
    defaults = model.defaults
    if body.priority and model.settings.scheduling_policy != "priority":
        raise NotSupported("priority: only with the server's --scheduling-policy priority", param="priority")
    return SamplingParams(
        max_tokens=0,
        min_tokens=body.min_tokens or 0,
        allowed_token_ids=_allowed(body.allowed_token_ids, model),
        bad_words=_bad_words(body.bad_words or (), model.tokenizer),
        logit_bias=_logit_bias(body.logit_bias or {}, model),
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        temperature=_given(body.temperature, defaults.temperature),
        top_k=max(0, _given(body.top_k, defaults.top_k)),
        top_p=_given(body.top_p, defaults.top_p),
        min_p=_given(body.min_p, defaults.min_p),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _given(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def check_num_choices(num_choices: int, settings: Settings) -> None:
    """Raises InvalidRequest."""
    if num_choices > settings.max_choices:
        raise InvalidRequest(
            f"n: the request asks for {num_choices} choices, prompts × n or best_of; at most {settings.max_choices} "
            "are allowed",
            param="n",
        )


def stop_strings(stop: str | Sequence[str] | None, settings: Settings) -> tuple[str, ...]:
    """Raises InvalidRequest."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > settings.max_stop_sequences:
        raise InvalidRequest(
            f"stop: {len(stops)} strings, at most {settings.max_stop_sequences} are allowed", param="stop"
        )
    for text in stops:
        if not text:
            raise InvalidRequest("stop: an empty string would stop at once", param="stop")
        if len(text) > settings.max_stop_chars:
            raise InvalidRequest(f"stop: a string is longer than {settings.max_stop_chars} characters", param="stop")
    return stops


def stop_token_ids(body: SamplingFields, model: ModelText) -> tuple[int, ...]:
    """The request's own, and every end of text or turn unless ignore_eos. Raises InvalidRequest."""
    own = body.stop_token_ids or ()
    check_token_ids(own, "stop_token_ids", model)
    ends = () if body.ignore_eos else model.tokenizer.eos_token_ids
    return tuple(dict.fromkeys([*ends, *own]))


def check_token_ids(token_ids: Sequence[int], param: str, model: ModelText) -> None:
    """Raises InvalidRequest for an id outside of the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= model.vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < model.vocab_size)
        raise InvalidRequest(
            f"{param}: token id {wrong} is outside of the vocabulary of {model.vocab_size}", param=param
        )


def _allowed(token_ids: Sequence[int] | None, model: ModelText) -> tuple[int, ...] | None:
    if token_ids is None:
        return None
    check_token_ids(token_ids, "allowed_token_ids", model)
    return tuple(dict.fromkeys(token_ids))


def _logit_bias(bias: Mapping[str, float], model: ModelText) -> tuple[tuple[int, float], ...]:
    limit = model.settings.max_logit_bias
    if len(bias) > limit:
        raise InvalidRequest(f"logit_bias: {len(bias)} entries, at most {limit} are allowed", param="logit_bias")
    entries = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10:
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        check_token_ids((int(key),), "logit_bias", model)
        if not -100 <= value <= 100:
            raise InvalidRequest(f"logit_bias: {value} is not between -100 and 100", param="logit_bias")
        entries.append((int(key), value))
    return tuple(entries)


def _bad_words(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the start of a text, and after a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise InvalidRequest("bad_words: a word is empty", param="bad_words")
        bare = word.lstrip(" ")
        for spelled in tokenizer.encode_batch([bare, " " + bare], add_special_tokens=False):
            sequences[tuple(spelled)] = None
    return tuple(sequences)


def fit_prompt(
    token_ids: Sequence[int],
    model: ModelText,
    *,
    param: str,
    max_tokens: int | None,
    max_tokens_param: str,
    default_max_tokens: int | None,
    truncate: int | None,
    text: str | None = None,
) -> Prompt:
    """A prompt that fits the context together with its answer.

    `max_tokens` None means `default_max_tokens`, and that None the rest of the context; a default shrinks to the room
    there is. `truncate` keeps the last so many tokens (−1: as many as leave room). Raises ContextTooLong,
    InvalidRequest.
    """
    context = model.max_model_len
    if not token_ids:
        raise InvalidRequest(f"{param}: the prompt is empty: this model needs at least one token", param=param)
    check_token_ids(token_ids, param, model)
    if truncate is not None:
        if truncate == 0:
            raise InvalidRequest("truncate_prompt_tokens: nothing would be left", param="truncate_prompt_tokens")
        keep = max(1, context - (max_tokens or 1)) if truncate == -1 else truncate
        token_ids = token_ids[-keep:]
    room = context - len(token_ids)
    needed = 1 if max_tokens is None else max_tokens
    if room < needed:
        raise ContextTooLong(  # clients know this error by its first words
            f"This model's maximum context length is {context} tokens; the request has {len(token_ids)} in the prompt "
            f"and asks for {needed} in the answer. Shorten the prompt or {max_tokens_param}.",
            param=param if room < 1 else max_tokens_param,
        )
    if max_tokens is None:
        max_tokens = room if default_max_tokens is None else min(default_max_tokens, room)
    return Prompt(tuple(token_ids), max_tokens, text)


def cache_namespace(salt: str | None) -> int:
    """Requests with one salt share cached prefixes; 0 is everybody's."""
    return 0 if salt is None else int.from_bytes(sha256(salt.encode()).digest()[:7], "big") + 1


def prompt_seeds(seed: int | None, num_prompts: int, draw: SeedSource) -> tuple[int, ...]:
    """The client's seed for every prompt, or one drawn for each: signed 64 bits become unsigned."""
    if seed is None:
        return tuple(draw() for _ in range(num_prompts))
    return (seed & _MAX_SEED,) * num_prompts


def check_min_tokens(min_tokens: int | None, max_tokens: int) -> None:
    """Raises InvalidRequest."""
    if (min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"min_tokens: {min_tokens} is more than the answer may have, {max_tokens}", param="min_tokens"
        )


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> bool:
    """Whether usage comes with the stream. Raises InvalidRequest."""
    if options is None:
        return False
    if not stream:
        raise InvalidRequest("stream_options: only with stream", param="stream_options")
    if options.include_obfuscation:
        raise NotSupported("stream_options.include_obfuscation: chunks carry no padding", param="stream_options")
    return bool(options.include_usage)
