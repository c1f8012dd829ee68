"""/v1/chat/completions: request → Plan; parts and answers → chunks and response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import orjson

from server.errors import InvalidRequest, NotSupported
from server.generation import Answer, Finish, Generation, Part
from server.plan import ModelText, OutputOptions, Plan
from server.protocol.chat import ChatRequest
from server.protocol.common import JsonObject
from server.sse import DONE, error_frame, frame
from server.translate.messages import num_message_chars, prompt_tokens
from server.translate.parts import ResponseHead, Timings, chat_logprobs, prompt_logprobs, usage_fields
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


@dataclass(frozen=True)
class ChatJob:
    """See service.Job."""

    body: ChatRequest
    id_prefix: ClassVar[str] = "chatcmpl-"
    starts_text: ClassVar[bool] = True

    @property
    def request_id(self) -> str | None:
        return self.body.request_id

    def num_choices(self) -> int:
        return self.body.n or 1

    def num_chars(self) -> int:
        return num_message_chars(self.body)

    def plan(self, model: ModelText, draw_seed: SeedSource) -> Plan:
        body = self.body
        check_supported(body)
        check_stream_options(body.stream, body.stream_options)
        check_num_choices(self.num_choices(), model.settings)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs: only with logprobs", param="top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        named = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        prompt = fit_prompt(
            prompt_tokens(body, model, add_special_tokens=body.add_special_tokens is True),
            model,
            param="messages",
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            max_tokens_param=named,
            default_max_tokens=None,
            truncate=body.truncate_prompt_tokens,
        )
        check_min_tokens(body.min_tokens, prompt.max_tokens)
        return Plan(
            prompts=(prompt,),
            sampling=sampling_params(body, model, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs),
            seeds=prompt_seeds(body.seed, 1, draw_seed),
            num_choices=self.num_choices(),
            num_draws=self.num_choices(),
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
        )

    def text_offsets(self, plan: Plan, model: ModelText) -> list[int]:
        return []

    def writer(self, head: ResponseHead, generation: Generation) -> ChatWriter:
        return ChatWriter(self.body, head, generation)

    def error_event(self, error: Exception, writer: object) -> bytes:
        return error_frame(error)


def check_supported(body: ChatRequest) -> None:
    """Raises NotSupported for what the API has and this server does not do."""
    for name in ("functions", "tools"):
        if getattr(body, name):
            raise NotSupported(f"{name}: this server does not call tools", param=name)
    for name in ("tool_choice", "function_call"):
        if getattr(body, name) not in (None, "none", "auto"):
            raise NotSupported(f"{name}: this server does not call tools", param=name)
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise NotSupported("response_format: only {'type': 'text'} is supported", param="response_format")
    if body.modalities not in (None, ["text"]):
        raise NotSupported("modalities: only ['text'] is supported", param="modalities")
    for name in ("audio", "web_search_options", "moderation"):
        if getattr(body, name) is not None:
            raise NotSupported(f"{name}: not supported by this server", param=name)
    if body.store:
        raise NotSupported("store: this server stores nothing", param="store")
    if body.prompt_cache_retention == "24h":
        raise NotSupported("prompt_cache_retention: the prefix cache lives in memory", param="prompt_cache_retention")
    if body.service_tier not in (None, "auto", "default"):
        raise NotSupported("service_tier: only 'auto' and 'default' are supported", param="service_tier")
    if body.verbosity not in (None, "medium"):
        raise NotSupported("verbosity: only 'medium' is supported", param="verbosity")


class ChatWriter:
    """The wire form of one chat request's answers: chunks while it runs, or the response at its end."""

    def __init__(self, body: ChatRequest, head: ResponseHead, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._num_choices = generation.plan.num_choices
        self._keep_tokens = generation.plan.output.keep_tokens
        self._tier = {} if body.service_tier is None else {"service_tier": "default"}
        self._fields = head.fields("chat.completion.chunk") | self._tier
        self._head = head
        self._include_usage = check_stream_options(body.stream, body.stream_options)
        self._before = orjson.dumps(self._fields)[:-1] + b',"choices":[{"index":'
        self._after = b'},"logprobs":null,"finish_reason":null}]' + (b',"usage":null}' if self._include_usage else b"}")
        self._opened = False

    # Chunks

    def part(self, part: Part) -> bytes:
        """The frames of one part."""
        opening = b"" if self._opened else self._opening()
        if not self._keep_tokens:
            text = self._plain(part) if part.text else b""
        else:
            text = self._tokens(part) if part.text or part.token_ids else b""
        if part.finish is None:
            return opening + text
        return opening + text + self._chunk({"index": part.choice, "delta": {}, "finish_reason": part.finish})

    def _opening(self) -> bytes:
        """Each choice's role, in the order of the choices: clients place choices by the order of their first chunks."""
        self._opened = True
        about = self._about_prompt()
        delta = {"role": "assistant", "content": "", "refusal": None}
        frames = []
        for index in range(self._num_choices):
            frames.append(self._chunk({"index": index, "delta": delta, "finish_reason": None}, about))
            about = {}
        return b"".join(frames)

    def _plain(self, part: Part) -> bytes:
        """The common case, at the least cost."""
        return frame(
            b'%b%d,"delta":{"content":%b%b' % (self._before, part.choice, orjson.dumps(part.text), self._after)
        )

    def _tokens(self, part: Part) -> bytes:
        choice: JsonObject = {"index": part.choice, "delta": {"content": part.text}, "finish_reason": None}
        if self._body.logprobs:
            choice["logprobs"] = chat_logprobs(part.logprobs, self._body.top_logprobs or 0)
        if self._body.return_token_ids:
            choice["token_ids"] = part.token_ids
        return self._chunk(choice)

    def closing(self, timings: Timings) -> bytes:
        """What comes after the last part."""
        fields: JsonObject = {}
        if self._include_usage:
            fields["usage"] = usage_fields(self._generation.usage)
        if self._body.return_timings:
            fields["timings"] = timings.fields()
        return (frame(orjson.dumps(self._fields | {"choices": []} | fields)) if fields else b"") + DONE

    def _chunk(self, choice: JsonObject, about: JsonObject | None = None) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return frame(orjson.dumps(self._fields | {"choices": [{"logprobs": None} | choice]} | usage | (about or {})))

    # The whole

    def response(self, answers: Sequence[Answer], timings: Timings) -> bytes:
        body = (
            self._head.fields("chat.completion")
            | self._tier
            | {
                "choices": [self._whole(index, answer) for index, answer in enumerate(answers)],
                "usage": usage_fields(self._generation.usage),
            }
            | self._about_prompt()
        )
        if self._body.return_timings:
            body["timings"] = timings.fields()
        return orjson.dumps(body)

    def _whole(self, index: int, answer: Answer) -> JsonObject:
        finish: Finish = answer.finish
        choice: JsonObject = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": None,
            "finish_reason": finish,
        }
        if self._body.logprobs:
            choice["logprobs"] = chat_logprobs(answer.logprobs, self._body.top_logprobs or 0)
        if self._body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    # Both

    def _about_prompt(self) -> JsonObject:
        generation, about = self._generation, dict[str, object]()
        if self._body.return_token_ids:
            about["prompt_token_ids"] = generation.plan.prompts[0].token_ids
        if self._body.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_logprobs(
                generation.prompt_logprobs[0], self._body.prompt_logprobs, generation.tokenizer
            )
        return about
