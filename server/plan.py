"""What a request comes to once it is understood: token ids and the rules for what comes back. No wire, no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.types import GenerationRequest, Pooling, SamplingParams
from server.settings import Settings
from server.structured.compiler import Constraint, GrammarCompiler
from server.structured.parser import AnswerSyntax
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What null sampling fields mean: the model's generation_config, else these."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ModelText:
    """What of a model concerns its requests: text, and the bounds of what may be asked."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None: the model is no chat model
    vocab_size: int  # rows of the embedding: ids below may be asked for
    max_model_len: int
    defaults: SamplingDefaults
    settings: Settings
    own_template: Callable[[str], ChatTemplate]  # of a Jinja source, with this model's special texts
    grammars: GrammarCompiler  # for this model's tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in tokens, with the room that its answer has."""

    token_ids: tuple[int, ...]
    max_tokens: int
    text: str | None = None  # as the client wrote it; None when it came as token ids


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the tokens of a choice become text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    keep_tokens: bool = False  # deltas carry their tokens, for logprobs and token ids


@dataclass(frozen=True, slots=True)
class Plan:
    """A request, ready to run: `num_draws` choices of each prompt, of which `num_choices` are answered."""

    prompts: tuple[Prompt, ...]
    sampling: SamplingParams  # max_tokens is each prompt's own
    seeds: tuple[int, ...]  # one per prompt, 64 bits unsigned
    num_choices: int = 1
    num_draws: int = 1
    stop_token_ids: tuple[int, ...] = ()
    cache_namespace: int = 0
    priority: int = 0
    timeout_seconds: float | None = None  # from the request's arrival; None = no limit of its own
    pooling: Pooling | None = None
    output: OutputOptions = field(default_factory=OutputOptions)
    constraint: Constraint | None = None  # to be checked by the model's `grammars` before it runs
    syntax: AnswerSyntax | None = None  # what to tell apart in an answer; None: all of it is text

    def request(self, prompt_index: int, request_id: int, tenant: int) -> GenerationRequest:
        """What the engine is asked for one of the prompts."""
        prompt = self.prompts[prompt_index]
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=replace(self.sampling, max_tokens=prompt.max_tokens),
            seed=self.seeds[prompt_index],
            stop_token_ids=self.stop_token_ids,
            n=self.num_draws,
            cache_namespace=self.cache_namespace,
            tenant=tenant,
            priority=self.priority,
            pooling=self.pooling,
            constraint=None if self.constraint is None else self.constraint.grammar,
        )
