"""A toy model side: a byte-level tokenizer of 256 tokens and some special ones, and an engine that plays a script."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.client import EngineStatus, StepListener
from engine.errors import EngineDead
from engine.supervisor import Counters, EngineState
from engine.types import (
    CacheBranch,
    EngineInfo,
    ErrorKind,
    FinishReason,
    GenerationRequest,
    KVGroupStats,
    RequestUpdate,
    StepStats,
    TokenLogprobs,
)
from server.app import create_app
from server.plan import ModelText, SamplingDefaults
from server.settings import Settings
from server.state import ServedModel, Server
from server.structured.compiler import GrammarCompiler
from server.text.chat_template import ChatTemplate
from server.text.spelling import byte_alphabet
from server.text.tokenizer import Tokenizer

MODEL = "toy"
CONTEXT = 256
EOS = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", EOS)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy_tokenizer(merges: Sequence[str] = (), special: Sequence[str] = SPECIAL, **options: Any) -> Tokenizer:
    """Token i < 256 is byte i; then `merges` (pairs of ASCII characters), then the special ones."""
    characters = {byte: character for character, byte in byte_alphabet().items()}
    vocab = {characters[byte]: byte for byte in range(256)}
    pairs = [(merge[0], merge[1]) for merge in merges]
    vocab |= {"".join(pair): 256 + index for index, pair in enumerate(pairs)}
    backend = Backend(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    return Tokenizer(backend, **options)


INFO = EngineInfo(
    architecture="toy",
    num_parameters=1,
    vocab_size=259,
    max_model_len=CONTEXT,
    block_size=16,
    num_kv_blocks=(64,),
    kv_capacity_tokens=1024,
    kv_cache_bytes=1024,
    kv_bytes_per_token=1,
    weight_bytes=1,
    max_num_batched_tokens=64,
    max_num_seqs=8,
    device="cpu",
    kernels="toy",
    dtype="float32",
    kv_cache_dtype="float32",
    quantization="none",
    num_threads=1,
    hidden_size=4,
)

Script = Callable[[GenerationRequest, int], Sequence[int]]  # (request, choice index) → the tokens it draws


def saying(text: str | bytes) -> Script:
    """The same bytes for every choice, then the end of the turn."""
    tokens = [*(text.encode() if isinstance(text, str) else text), 258]
    return lambda request, choice: tokens


def logprobs_of(token_id: int, position: int, num_top: int) -> TokenLogprobs:
    """Made up, but well-formed: the token is the likeliest, alternatives follow its id."""
    own = -0.25 - position / 1024
    top = [(token_id, own), *[((token_id + k) % 256, own - k) for k in range(1, num_top)]]
    return TokenLogprobs(token_id, own, 1, tuple(top[:num_top]))


class ToyStream:
    """See engine.client.RequestStream."""

    def __init__(self, engine: ToyEngine, request: GenerationRequest) -> None:
        self._engine = engine
        self._request = request
        self._updates: AsyncGenerator[list[RequestUpdate]] = engine.play(request)
        self.begun_at: float | None = time.monotonic()

    def __aiter__(self) -> AsyncIterator[list[RequestUpdate]]:
        return self._updates

    async def aclose(self) -> None:
        await self._updates.aclose()
        if self._engine.open.pop(self._request.request_id, None) is not None:
            self._engine.dropped.append(self._request.request_id)


@dataclass(eq=False)
class ToyEngine:
    """Plays a script: one token of every choice a step. `gate` is awaited before each step."""

    script: Script = field(default_factory=lambda: saying("Hello"))
    info: EngineInfo | None = INFO
    gate: Callable[[int], Any] | None = None  # called with the step's number; awaited when it returns an awaitable
    fail_at: tuple[int, ErrorKind] | None = None  # step, kind
    state: EngineState = EngineState.READY
    num_cached_tokens: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)
    open: dict[int, set[int]] = field(default_factory=dict)  # request id → choices that still run
    dropped: list[int] = field(default_factory=list)
    aborted: list[tuple[int, int | None]] = field(default_factory=list)
    closed: bool = False
    num_waiting: int = 0
    profiled_steps: int = 0
    counters: Counters = field(default_factory=Counters)
    engine_pid: int | None = None
    listeners: list[StepListener] = field(default_factory=list)
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    def new_request_id(self) -> int:
        return next(self._ids)

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(self.state, False, "the toy is broken", None, 0.0)

    def stats(self) -> StepStats | None:
        running = sum(map(len, self.open.values()))
        return StepStats(7, running, self.num_waiting, 3, 2, (KVGroupStats(60, 2, 1, 1),), 5, 0, 100, 40, 0, 0, 0, 0)

    def submit(self, request: GenerationRequest) -> ToyStream:
        if self.state is EngineState.BROKEN:
            raise EngineDead("the engine is broken")
        self.requests.append(request)
        self.open[request.request_id] = set(range(request.n))
        return ToyStream(self, request)

    def abort(self, request_id: int, choice_index: int | None = None) -> None:
        self.aborted.append((request_id, choice_index))

    def reset_prefix_cache(self) -> None:
        self.num_cached_tokens = 0

    def look_at_cache(self, max_branches: int) -> tuple[CacheBranch, ...]:
        return (CacheBranch(-1, 0, 16, 48, 1), CacheBranch(0, 16, 32, 32, 1))[:max_branches]

    def start_profile(self, max_steps: int) -> None:
        self.profiled_steps = max_steps

    async def stop_profile(self) -> bytes:
        return b"{}"

    def flight_record(self) -> dict[str, Any]:
        return {"steps": [], "open_requests": [{"request_id": request_id} for request_id in self.open]}

    def longest_wait_seconds(self) -> float:
        return 0.0

    def add_step_listener(self, listener: StepListener) -> None:
        self.listeners.append(listener)

    def remove_step_listener(self, listener: StepListener) -> None:
        self.listeners.remove(listener)

    async def close(self) -> None:
        self.closed = True

    async def play(self, request: GenerationRequest) -> AsyncGenerator[list[RequestUpdate]]:
        if request.pooling is not None:
            self.open.pop(request.request_id, None)
            vector = tuple(float(len(request.prompt_token_ids) + i) for i in range(4))
            yield [RequestUpdate(request.request_id, 0, embedding=vector, finish_reason=FinishReason.LENGTH)]
            return
        drawn = {choice: self.script(request, choice) for choice in range(request.n)}
        for step in range(request.sampling.max_tokens + 1):
            if self.gate is not None and (waiting := self.gate(step)) is not None:
                await waiting
            else:
                await asyncio.sleep(0)
            updates = [self._update(request, choice, step, drawn[choice]) for choice in range(request.n)]
            told = [update for update in updates if update is not None]
            if told:
                yield told
            if request.request_id not in self.open:
                return

    def _update(
        self, request: GenerationRequest, choice: int, step: int, tokens: Sequence[int]
    ) -> RequestUpdate | None:
        running = self.open.get(request.request_id, set())
        if choice not in running:
            return None
        update = replace(
            self._draw(request, choice, step, tokens),
            prompt_logprobs=_prompt_logprobs(request) if step == 0 and choice == 0 else (),
            num_cached_tokens=self.num_cached_tokens,
        )
        if update.finish_reason is not None:
            running.discard(choice)
            if not running:
                del self.open[request.request_id]
        return update

    def _draw(self, request: GenerationRequest, choice: int, step: int, tokens: Sequence[int]) -> RequestUpdate:
        nothing = RequestUpdate(request.request_id, choice)
        if self.fail_at is not None and step == self.fail_at[0]:
            return replace(nothing, finish_reason=FinishReason.ERROR, error="the toy fails", error_kind=self.fail_at[1])
        if {(request.request_id, choice), (request.request_id, None)} & set(self.aborted):
            return replace(nothing, finish_reason=FinishReason.ABORT)
        if request.sampling.max_tokens == 0:
            return replace(nothing, finish_reason=FinishReason.LENGTH)
        token = tokens[step % len(tokens)]
        logprobs = request.sampling.logprobs
        drawn = replace(
            nothing,
            new_token_ids=(token,),
            logprobs=() if logprobs is None else (logprobs_of(token, step, logprobs),),
        )
        if token in request.stop_token_ids and step >= request.sampling.min_tokens:
            return replace(drawn, finish_reason=FinishReason.STOP, stop_token_id=token)
        if step + 1 == request.sampling.max_tokens:
            return replace(drawn, finish_reason=FinishReason.LENGTH)
        return drawn


def _prompt_logprobs(request: GenerationRequest) -> tuple[TokenLogprobs | None, ...]:
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return ()
    tokens = enumerate(request.prompt_token_ids)
    return tuple(logprobs_of(token, position, num_top) if position else None for position, token in tokens)


def toy_model(
    engine: ToyEngine, settings: Settings, tokenizer: Tokenizer | None = None, template: str = TEMPLATE
) -> ServedModel:
    tokenizer = tokenizer or toy_tokenizer()

    def own_template(source: str) -> ChatTemplate:
        return ChatTemplate({"default": source}, {})

    text = ModelText(
        tokenizer=tokenizer,
        chat_template=own_template(template),
        vocab_size=tokenizer.vocab_size,
        max_model_len=CONTEXT,
        defaults=SamplingDefaults(),
        settings=settings,
        own_template=own_template,
        grammars=GrammarCompiler(
            tokenizer, max_bytes=settings.max_grammar_bytes, timeout_seconds=settings.grammar_timeout_seconds
        ),
    )
    return ServedModel((MODEL, "alias"), engine, text, 1_700_000_000, "fp_toy")


@dataclass(eq=False)
class ToyServer:
    """The whole application over a toy engine, and a client of it."""

    app: FastAPI
    engine: ToyEngine
    http: httpx.AsyncClient

    @property
    def server(self) -> Server:
        server: Server = self.app.state.server
        return server

    async def post(self, path: str, body: Any = None, **fields: Any) -> httpx.Response:
        """`fields` are the body's, unless it is given whole."""
        return await self.http.post(path, json=fields if body is None else body)

    async def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The data of a streamed answer's events; checks that [DONE] ends it."""
        response = await self.post(path, fields | {"stream": True})
        assert response.status_code == 200, response.text
        frames = response.text.split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


@asynccontextmanager
async def toy_server(
    engine: ToyEngine | None = None,
    tokenizer: Tokenizer | None = None,
    template: str = TEMPLATE,
    **settings: Any,
) -> AsyncIterator[ToyServer]:
    """Started, loaded, and stopped at the end."""
    engine = engine or ToyEngine()
    chosen = Settings(**settings)
    loaded = asyncio.Event()

    async def load(report: Any) -> ServedModel:
        loaded.set()
        return toy_model(engine, chosen, tokenizer, template)

    app = create_app(chosen, load)
    async with app.router.lifespan_context(app):
        await loaded.wait()
        assert app.state.server.model is not None
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
            yield ToyServer(app, engine, http)


def samples(text: str) -> dict[str, float]:
    """name{labels} → value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
