"""What crosses the boundary between server and engine: plain frozen data, standard library only.

Tokens only: no text, no arrays. Ids of requests, tenants and cache namespaces are integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a choice ended. Exactly one of these arrives per choice, in its last RequestUpdate."""

    STOP = "stop"  # a stop token was sampled
    LENGTH = "length"  # max_tokens or the model's context was reached
    ABORT = "abort"  # ended by abort() before its natural end
    ERROR = "error"  # this choice alone failed; RequestUpdate.error says why


class ErrorKind(StrEnum):
    """Whose fault the error of a choice is: what the server answers."""

    REJECTED = "rejected"  # the request can never run here: the client's fault (400)
    INTERNAL = "internal"  # the engine failed on this choice (500)
    UNAVAILABLE = "unavailable"  # the engine is gone and the choice could not be carried over (503)


class Pooling(StrEnum):
    """How the hidden states of a prompt become one vector."""

    MEAN = "mean"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; applied in the order of the fields' groups below.

    All ranges are checked by the server; the engine trusts them.
    """

    max_tokens: int  # output tokens at most; 0 = compute the prompt only
    min_tokens: int = 0  # stop tokens are masked until this many outputs exist
    # masks
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    # bias, penalties
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0  # over prompt and outputs
    presence_penalty: float = 0.0  # over outputs
    frequency_penalty: float = 0.0  # over outputs
    # draw
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    # reports: number of alternatives beside the token itself; None = no logprobs at all
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Choices `choice_index` … `choice_index + n - 1` of one request, all from the same tokens.

    A fresh request with n choices is one record with choice_index 0 and that n. Resuming after preemption
    and replaying after the engine's death send one record per choice (n = 1) whose `output_token_ids` hold
    what it had produced: they count as outputs (penalties, min_tokens, limits, noise position), not prompt.
    `prompt_token_ids` is never empty and, with max_tokens, fits the context.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # 64 bits, unsigned; drawn by the server when the client gives none
    stop_token_ids: tuple[int, ...] = ()  # every EOS resolved by the server; empty under ignore_eos
    output_token_ids: tuple[int, ...] = ()
    choice_index: int = 0
    n: int = 1
    cache_namespace: int = 0  # requests share cached prefixes only within one namespace
    tenant: int = 0  # whose request it is, for fair queues
    priority: int = 0  # lower goes first, under the priority policy
    pooling: Pooling | None = None  # an embedding request: max_tokens is 0, the vector comes in the last update
    constraint: str | None = None  # an llguidance grammar that the outputs match; the server has compiled it before


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-softmax of the raw logits at one position; natural log, −inf is sent as −9999."""

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely token
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first, ties by lowest id


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """News of one choice. The one with a finish_reason is the choice's last."""

    request_id: int
    choice_index: int
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per new token when asked for, else empty
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # newly known positions, in order; the first is None
    num_cached_tokens: int = 0  # prefix hit at first admission
    embedding: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it (the last of new_token_ids)
    error: str | None = None
    error_kind: ErrorKind = ErrorKind.INTERNAL  # means something beside an error only


@dataclass(frozen=True, slots=True)
class KVGroupStats:
    """Blocks of one KV group by state; the four add up to the total."""

    free: int
    private: int
    shared: int
    cached: int  # in the prefix tree, referenced by nobody: evictable


@dataclass(frozen=True, slots=True)
class CacheBranch:
    """An edge of the prefix cache's tree; what it holds in tokens, never which."""

    parent: int  # its place in the list; −1: it begins at a root
    start_tokens: int  # before it, from the root on
    num_tokens: int
    subtree_tokens: int  # on it and below it
    num_sequences: int  # live ones that stand on it or below it


@dataclass(frozen=True, slots=True)
class StepStats:
    """The engine's state after a step. Names ending in _total count since the engine started."""

    step_id: int
    num_running: int
    num_waiting: int
    num_prefill_tokens: int  # scheduled in this step
    num_decode_tokens: int
    kv_groups: tuple[KVGroupStats, ...]
    num_wasted_slots: int  # slots of live blocks that hold no token
    oldest_waiting_steps: int  # steps the queue's head has waited
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    evicted_blocks_total: int
    preemptions_total: int
    preempted_tokens_total: int  # computed tokens given up
    overrun_tokens_total: int  # sampled but not delivered (the choice had ended)
    kv_host_groups: tuple[KVGroupStats, ...] = ()  # of the host's pool, where there is one; private, shared = parked
    num_swapped: int = 0  # of num_waiting, those whose KV waits in the host's memory
    parked_total: int = 0  # preemptions after which the KV waited in the host's memory
    swapped_out_blocks_total: int = 0  # copied to the host's memory, evicted prefixes too
    swapped_in_blocks_total: int = 0
    # Tokens that each expert of a mixture has taken, all layers together; () for a model without. The loop adds it.
    expert_tokens_total: tuple[int, ...] = ()
    schedule_seconds: float = 0.0  # the times are filled in by the loop
    execute_seconds: float = 0.0
    forward_seconds: float = 0.0  # of execute_seconds: the model
    sample_seconds: float = 0.0  # of execute_seconds: output head, draw, logprobs
    kernel_seconds: tuple[tuple[str, float], ...] = ()  # of forward_seconds, by operation: in one step of many
    update_seconds: float = 0.0
    publish_seconds: float = 0.0  # telling the server about the step before: this one's is not over when it is told
    gap_seconds: float = 0.0  # between the step before and this one, if there was work all the while
    started_at: float = 0.0  # time.monotonic() of the step's begin


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far the start has come."""

    stage: str  # for people: "reading weights"
    fraction: float  # of the whole start, 0 … 1


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine tells the server once it can serve."""

    architecture: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_kv_blocks: tuple[int, ...]  # per KV group
    kv_capacity_tokens: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    weight_bytes: int
    max_num_batched_tokens: int
    max_num_seqs: int
    device: str
    kernels: str
    dtype: str
    kv_cache_dtype: str
    quantization: str
    num_threads: int
    hidden_size: int
    host_kv_cache_bytes: int = 0  # in the host's memory, for blocks that have to leave the KV cache
    max_step_ms: int = 0  # chunks of prompts are cut to steps of about that; 0: the budget in tokens alone bounds them
    step_prompt_tokens: int = 0  # how many tokens of one new prompt that comes to
