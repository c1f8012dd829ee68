"""/v1/chat/completions: request → Plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from server.errors import InvalidRequest, NotSupported
from server.generation import Generation
from server.plan import ModelText, OutputOptions, Plan
from server.protocol.chat import ChatRequest
from server.sse import error_frame
from server.translate.answer_form import chat_form, check_sizes, check_together, num_form_chars
from server.translate.chat_writer import ChatWriter
from server.translate.messages import encode_prompt, num_json_chars, num_message_chars, render
from server.translate.parts import ResponseHead
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
        return num_message_chars(self.body) + num_json_chars(self.body.functions) + num_form_chars(self.body)

    def plan(self, model: ModelText, draw_seed: SeedSource) -> Plan:
        body = self.body
        check_supported(body)
        check_sizes(body, model)
        check_stream_options(body.stream, body.stream_options)
        check_num_choices(self.num_choices(), model.settings)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs: only with logprobs", param="top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        named = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        rendered = render(body, model)
        form = chat_form(body, model, rendered)
        check_together(body, form.constraint)
        prompt = fit_prompt(
            encode_prompt(rendered.text, model, add_special_tokens=body.add_special_tokens is True),
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
                skip_special_tokens=body.skip_special_tokens is not False and form.syntax is None,  # marks are read
                keep_tokens=logprobs is not None or bool(body.return_token_ids),
            ),
            constraint=form.constraint,
            syntax=form.syntax,
        )

    def text_offsets(self, plan: Plan, model: ModelText) -> list[int]:
        return []

    def writer(self, head: ResponseHead, generation: Generation) -> ChatWriter:
        return ChatWriter(self.body, head, generation)

    def error_event(self, error: Exception, writer: object) -> bytes:
        return error_frame(error)


def check_supported(body: ChatRequest) -> None:
    """Raises NotSupported for what the API has and this server does not do."""
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
