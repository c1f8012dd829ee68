"""/v1/completions: request → Plan; parts and answers → chunks and response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import orjson

from engine.types import TokenLogprobs
from server.errors import InvalidRequest, NotSupported
from server.generation import Answer, Generation, Part
from server.plan import ModelText, OutputOptions, Plan, Prompt
from server.protocol.common import JsonObject
from server.protocol.completions import CompletionRequest
from server.sse import DONE, error_frame, frame
from server.text.output import Delta, LogprobEntry, echo_prompt
from server.text.tokenizer import Tokenizer
from server.translate.answer_form import check_together, completion_form, num_form_chars
from server.translate.parts import ResponseHead, Timings, legacy_logprobs, prompt_logprobs, usage_fields
from server.translate.sampling import (
    SeedSource,
    cache_namespace,
    check_min_tokens,
    check_num_choices,
    check_stream_options,
    fit_prompt,
    prompt_seeds,
    sampling_params,
    stop_strings,
    stop_token_ids,
)

DEFAULT_MAX_TOKENS = 16


def prompt_list(prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | None) -> list[str | list[int]]:
    """The prompts of the four shapes; a null prompt is one empty text."""
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    if not prompt or isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item if isinstance(item, str) else list(item) for item in prompt if not isinstance(item, int)]


@dataclass(frozen=True)
class CompletionJob:
    """See service.Job."""

    body: CompletionRequest
    id_prefix: ClassVar[str] = "cmpl-"
    starts_text: ClassVar[bool] = False

    @property
    def request_id(self) -> str | None:
        return self.body.request_id

    @cached_property
    def _prompts(self) -> list[str | list[int]]:
        return prompt_list(self.body.prompt)

    @property
    def _num_draws(self) -> int:
        return max(self.body.n or 1, self.body.best_of or 1)

    def num_choices(self) -> int:
        return len(self._prompts) * self._num_draws

    def num_chars(self) -> int:
        return sum(map(len, self._prompts)) + len(self.body.suffix or "") + num_form_chars(self.body)

    def plan(self, model: ModelText, draw_seed: SeedSource) -> Plan:
        body = self.body
        self._check(model)
        draws, choices = self._num_draws, body.n or 1
        logprobs = 0 if body.logprobs is None and draws > choices else body.logprobs
        asked = [top for top in (body.logprobs if body.echo else None, body.prompt_logprobs) if top is not None]
        prompts = tuple(self._fit(prompt, model) for prompt in self._prompts)
        for prompt in prompts:
            check_min_tokens(body.min_tokens, prompt.max_tokens)
        constraint = completion_form(body, model).constraint
        check_together(body, constraint)
        return Plan(
            prompts=prompts,
            sampling=sampling_params(body, model, logprobs=logprobs, prompt_logprobs=max(asked, default=None)),
            seeds=prompt_seeds(body.seed, len(prompts), draw_seed),
            num_choices=choices,
            num_draws=draws,
            stop_token_ids=stop_token_ids(body, model),
            cache_namespace=cache_namespace(body.cache_salt),
            priority=body.priority or 0,
            timeout_seconds=body.timeout,
            output=OutputOptions(
                stop=stop_strings(body.stop, model.settings),
                include_stop=bool(body.include_stop_str_in_output),
                skip_special_tokens=body.skip_special_tokens is not False,
                keep_tokens=logprobs is not None or bool(body.return_token_ids),
            ),
            constraint=constraint,
        )

    def _check(self, model: ModelText) -> None:
        body = self.body
        check_stream_options(body.stream, body.stream_options)
        check_num_choices(self.num_choices(), model.settings)
        if body.best_of and body.best_of < (body.n or 1):
            raise InvalidRequest("best_of: must not be less than n", param="best_of")
        if body.stream and self._num_draws > (body.n or 1):
            raise InvalidRequest("best_of: cannot be ranked while streaming", param="best_of")
        if body.suffix and body.echo:
            raise InvalidRequest("echo: not together with suffix", param="echo")
        limit = model.settings.max_prompts
        if len(self._prompts) > limit:
            raise InvalidRequest(f"prompt: {len(self._prompts)} prompts, at most {limit} are allowed", param="prompt")

    def _fit(self, prompt: str | list[int], model: ModelText) -> Prompt:
        body = self.body
        return fit_prompt(
            self._encode(prompt, model.tokenizer),
            model,
            param="prompt",
            max_tokens=body.max_tokens,
            max_tokens_param="max_tokens",
            default_max_tokens=DEFAULT_MAX_TOKENS,
            truncate=body.truncate_prompt_tokens,
            text=prompt if isinstance(prompt, str) and body.truncate_prompt_tokens is None else None,
        )

    def _encode(self, prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
        if self.body.prompt is None:
            return _text_start(tokenizer)
        if self.body.suffix:
            return _fill_in(prompt, self.body.suffix, tokenizer)
        if isinstance(prompt, list):
            return prompt
        return encode(prompt, "prompt", tokenizer, add_special_tokens=self.body.add_special_tokens is not False)

    def text_offsets(self, plan: Plan, model: ModelText) -> list[int]:
        return [len(_echo(prompt, (), plan, model.tokenizer).text) for prompt in plan.prompts if self.body.echo]

    def writer(self, head: ResponseHead, generation: Generation) -> CompletionWriter:
        return CompletionWriter(self.body, head, generation)

    def error_event(self, error: Exception, writer: object) -> bytes:
        return error_frame(error)


def encode(text: str, param: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    """Raises InvalidRequest for what is no Unicode."""
    try:
        return tokenizer.encode(text, add_special_tokens)
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error


def _text_start(tokenizer: Tokenizer) -> list[int]:
    """What the model has seen before the first token of a text."""
    if tokenizer.prefix_ids:
        return list(tokenizer.prefix_ids)
    return [tokenizer.eos_token_ids[0] if tokenizer.bos_token_id is None else tokenizer.bos_token_id]


def _fill_in(prompt: str | list[int], suffix: str, tokenizer: Tokenizer) -> list[int]:
    tokens = tokenizer.fill_tokens
    if tokens is None:
        raise NotSupported("suffix: this model's vocabulary has no fill-in-the-middle tokens", param="suffix")
    before = prompt if isinstance(prompt, list) else encode(prompt, "prompt", tokenizer, add_special_tokens=False)
    after = encode(suffix, "suffix", tokenizer, add_special_tokens=False)
    return [*tokenizer.prefix_ids, tokens.prefix, *before, tokens.suffix, *after, tokens.middle]


def _echo(prompt: Prompt, logprobs: Sequence[TokenLogprobs | None], plan: Plan, tokenizer: Tokenizer) -> Delta:
    skip_special_tokens = plan.output.skip_special_tokens
    return echo_prompt(tokenizer, prompt.token_ids, prompt.text, logprobs, skip_special_tokens=skip_special_tokens)


class CompletionWriter:
    """The wire form of one completions request's answers: chunks while it runs, or the response at its end."""

    def __init__(self, body: CompletionRequest, head: ResponseHead, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._plan = generation.plan
        self._fields = head.fields("text_completion")
        self._include_usage = check_stream_options(body.stream, body.stream_options)
        self._before = orjson.dumps(self._fields)[:-1] + b',"choices":[{"index":'
        self._after = b',"logprobs":null,"finish_reason":null}]' + (b',"usage":null}' if self._include_usage else b"}")
        self._unopened = set(range(len(self._plan.prompts) * self._plan.num_choices))
        self._echoes: list[Delta | None] = [None] * len(self._plan.prompts)

    # Chunks

    def part(self, part: Part) -> bytes:
        """The frames of one part."""
        opening = self._opening(part.choice) if part.choice in self._unopened else b""
        if not self._plan.output.keep_tokens:
            text = self._plain(part) if part.text else b""
        else:
            text = self._chunk(self._choice(part.choice, part)) if part.text or part.token_ids else b""
        if part.finish is None:
            return opening + text
        end = {"index": part.choice, "text": "", "logprobs": None, "finish_reason": part.finish}
        return opening + text + self._chunk(end)

    def _opening(self, index: int) -> bytes:
        """What comes before a choice's first part: the echoed prompt and what is asked about it."""
        self._unopened.discard(index)
        about = self._about_prompt(index)
        if not (self._body.echo or about):
            return b""
        choice: JsonObject = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        if self._body.echo:
            echo = self._echo(index // self._plan.num_choices)
            choice |= {"text": echo.text, "logprobs": self._logprobs(echo.logprobs)}
        return self._chunk(choice | about)

    def _plain(self, part: Part) -> bytes:
        """The common case, at the least cost."""
        return frame(b'%b%d,"text":%b%b' % (self._before, part.choice, orjson.dumps(part.text), self._after))

    def closing(self, timings: Timings) -> bytes:
        """What comes after the last part."""
        fields: JsonObject = {}
        if self._include_usage:
            fields["usage"] = usage_fields(self._generation.usage)
        if self._body.return_timings:
            fields["timings"] = timings.fields()
        return (frame(orjson.dumps(self._fields | {"choices": []} | fields)) if fields else b"") + DONE

    def _chunk(self, choice: JsonObject) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return frame(orjson.dumps(self._fields | {"choices": [choice]} | usage))

    # The whole

    def response(self, answers: Sequence[Answer], timings: Timings) -> bytes:
        """The answers that are sent, best first where more were drawn."""
        plan = self._plan
        choices: list[JsonObject] = []
        for prompt in range(len(plan.prompts)):
            drawn = answers[prompt * plan.num_draws : (prompt + 1) * plan.num_draws]
            for answer in best(drawn, plan.num_choices):
                choices.append(self._whole(len(choices), answer))
        body = self._fields | {"choices": choices, "usage": usage_fields(self._generation.usage)}
        if self._body.return_timings:
            body["timings"] = timings.fields()
        return orjson.dumps(body)

    def _whole(self, index: int, answer: Answer) -> JsonObject:
        part = Part(index, answer.text, tuple(answer.token_ids), tuple(answer.logprobs), answer.finish)
        choice = self._choice(index, part) | self._about_prompt(index)
        if self._body.echo:
            echo = self._echo(index // self._plan.num_choices)
            choice["text"] = echo.text + answer.text
            choice["logprobs"] = self._logprobs([*echo.logprobs, *answer.logprobs])
        return choice | {"finish_reason": answer.finish}

    # Both

    def _choice(self, index: int, part: Part) -> JsonObject:
        choice: JsonObject = {
            "index": index,
            "text": part.text,
            "logprobs": self._logprobs(part.logprobs),
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> JsonObject | None:
        return None if self._body.logprobs is None else legacy_logprobs(entries, self._body.logprobs)

    def _about_prompt(self, index: int) -> JsonObject:
        prompt = index // self._plan.num_choices
        about: JsonObject = {}
        if self._body.return_token_ids:
            about["prompt_token_ids"] = self._plan.prompts[prompt].token_ids
        if self._body.prompt_logprobs is not None:
            reported = self._generation.prompt_logprobs[prompt]
            about["prompt_logprobs"] = prompt_logprobs(reported, self._body.prompt_logprobs, self._generation.tokenizer)
        return about

    def _echo(self, prompt: int) -> Delta:
        """Of one prompt, made once: choices share it."""
        echo = self._echoes[prompt]
        if echo is None:
            generation = self._generation
            logprobs = generation.prompt_logprobs[prompt] if self._body.logprobs is not None else ()
            echo = _echo(self._plan.prompts[prompt], logprobs, self._plan, generation.tokenizer)
            self._echoes[prompt] = echo
        return echo


def best(drawn: Sequence[Answer], num_choices: int) -> Sequence[Answer]:
    """The answers with the highest mean logprob, best first; all as they came where none is left out."""
    if len(drawn) == num_choices:
        return drawn
    return sorted(drawn, key=_mean_logprob, reverse=True)[:num_choices]


def _mean_logprob(answer: Answer) -> float:
    logprobs = [entry.token.logprob for entry in answer.logprobs if entry.token.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
