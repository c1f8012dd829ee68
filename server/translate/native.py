"""The native API: request → Plan; parts and answers → events and response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import orjson

from server.generation import Answer, Generation, Part
from server.plan import ModelText, OutputOptions, Plan
from server.protocol.common import JsonObject
from server.protocol.native import GenerateRequest
from server.sse import error_frame, frame
from server.translate.completions import encode
from server.translate.parts import ResponseHead, Timings
from server.translate.sampling import (
    SeedSource,
    cache_namespace,
    check_min_tokens,
    fit_prompt,
    prompt_seeds,
    sampling_params,
    stop_strings,
    stop_token_ids,
)

DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True)
class GenerateJob:
    """See service.Job. `streams`: each token is reported with its logprob."""

    body: GenerateRequest
    streams: bool = False
    id_prefix: ClassVar[str] = "gen-"
    starts_text: ClassVar[bool] = False

    @property
    def request_id(self) -> str | None:
        return self.body.request_id

    def num_choices(self) -> int:
        return 1

    def num_chars(self) -> int:
        return len(self.body.prompt)

    def plan(self, model: ModelText, draw_seed: SeedSource) -> Plan:
        body, tokens = self.body, self.body.prompt
        if isinstance(tokens, str):
            special = body.add_special_tokens is not False
            tokens = encode(tokens, "prompt", model.tokenizer, add_special_tokens=special)
        prompt = fit_prompt(
            tokens,
            model,
            param="prompt",
            max_tokens=body.max_tokens,
            max_tokens_param="max_tokens",
            default_max_tokens=DEFAULT_MAX_TOKENS,
            truncate=body.truncate_prompt_tokens,
        )
        check_min_tokens(body.min_tokens, prompt.max_tokens)
        return Plan(
            prompts=(prompt,),
            sampling=sampling_params(body, model, logprobs=0 if self.streams else None, prompt_logprobs=None),
            seeds=prompt_seeds(body.seed, 1, draw_seed),
            stop_token_ids=stop_token_ids(body, model),
            cache_namespace=cache_namespace(body.cache_salt),
            priority=body.priority or 0,
            timeout_seconds=body.timeout,
            output=OutputOptions(
                stop=stop_strings(body.stop, model.settings),
                include_stop=bool(body.include_stop_str_in_output),
                skip_special_tokens=body.skip_special_tokens is not False,
                keep_tokens=self.streams,
            ),
        )

    def text_offsets(self, plan: Plan, model: ModelText) -> list[int]:
        return []

    def writer(self, head: ResponseHead, generation: Generation) -> GenerateWriter:
        return GenerateWriter(head, generation)

    def error_event(self, error: Exception, writer: object) -> bytes:
        return error_frame(error)


class GenerateWriter:
    """Events and response of one native request."""

    def __init__(self, head: ResponseHead, generation: Generation) -> None:
        self._head = head
        self._generation = generation
        self._told = Answer("", [], [], "length")  # what the events so far add up to

    def part(self, part: Part) -> bytes:
        """An event a token; the text is with the last of them."""
        told, frames = self._told, []
        for index, entry in enumerate(part.logprobs, 1):
            event = {
                "text": part.text if index == len(part.logprobs) else "",
                "token_id": entry.token.token_id,
                "position": len(told.token_ids) + index - 1,
                "logprob": entry.token.logprob,
            }
            frames.append(frame(orjson.dumps(event)))
        told.text += part.text
        told.token_ids += part.token_ids
        told.finish = part.finish or told.finish
        return b"".join(frames)

    def closing(self, timings: Timings) -> bytes:
        return frame(orjson.dumps({"done": True, **self._totals(self._told, timings)}))

    def response(self, answers: Sequence[Answer], timings: Timings) -> bytes:
        return orjson.dumps(self._totals(answers[0], timings))

    def _totals(self, answer: Answer, timings: Timings) -> JsonObject:
        usage = self._generation.usage
        return {
            "id": self._head.id,
            "model": self._head.model,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "first_token_seconds": timings.first_token_seconds,
            "latency_seconds": timings.total_seconds,
        }
