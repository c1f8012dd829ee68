"""From settings to a model that can be asked: files, text side, engine process; with its progress told on the way."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.client import EngineClient
from engine.config import EngineConfig, FakeOptions
from engine.errors import ModelError
from engine.models.packed_cache import PackedCache
from engine.supervisor import SupervisorOptions
from engine.types import EngineInfo, LoadProgress
from engine.watchdog import Limits
from server.model_store import ModelFiles, resolve_model
from server.plan import ModelText, SamplingDefaults
from server.settings import Settings
from server.state import ServedModel
from server.structured.compiler import GrammarCompiler
from server.text.chat_template import ChatTemplate, ChatTemplateError
from server.text.loading import LoadedText, load_tokenizer
from server.text.vocabulary import vocabulary

_PROGRESS_SECONDS = 0.1  # between two looks at the engine's progress
Report = Callable[[LoadProgress], None]


async def load_model(settings: Settings, report: Report) -> ServedModel:
    """Everything from `--model` to an engine that serves. Raises ModelNotFound, EngineError."""
    report(LoadProgress("finding the model", 0.0))
    with_weights = settings.load_format != "dummy"
    files = await asyncio.to_thread(resolve_model, settings.model, settings.cache_dir, with_weights)
    client = EngineClient(engine_config(settings, files.path), supervisor_options(settings))
    await client.start()
    watching = asyncio.create_task(_watch(client, report))
    loading = asyncio.gather(client.wait_ready(), asyncio.to_thread(_load_text, _text_source(settings, files.path)))
    try:
        info, text = await loading
        client.use_vocabulary(await asyncio.to_thread(vocabulary, text.tokenizer, info.vocab_size))
        return _served_model(settings, files, text, client, info)
    except BaseException:
        await client.close()
        raise
    finally:
        watching.cancel()


def _load_text(path: Path) -> LoadedText:
    """The text side, with the tables that it would make for the first request made now."""
    text = load_tokenizer(path)
    text.tokenizer.decode((0,), skip_special_tokens=True)
    text.tokenizer.decode((0,), skip_special_tokens=False)
    return text


def _text_source(settings: Settings, path: Path) -> Path:
    """What stands in the packed cache in the place of a model's files, else these."""
    folder = settings.packed_cache_folder
    entry = None if folder is None else PackedCache(folder).find(path)
    return path if entry is None else entry.model


async def _watch(client: EngineClient, report: Report) -> None:
    while True:
        if (progress := client.status.progress) is not None:
            report(progress)
        await asyncio.sleep(_PROGRESS_SECONDS)


def supervisor_options(settings: Settings) -> SupervisorOptions:
    """When an engine counts as stuck, and what is kept of its last steps."""
    limits = Limits(
        step_seconds=settings.step_timeout_seconds,
        first_step_seconds=settings.first_step_timeout_seconds,
        pong_seconds=min(Limits().pong_seconds, settings.step_timeout_seconds),
    )
    folder = settings.flight_record_dir or settings.cache_dir / "flight-records"
    return SupervisorOptions(
        limits=limits,
        flight_steps=settings.flight_record_steps,
        flight_folder=folder,
        log_format=settings.log_format,
    )


def engine_config(settings: Settings, model_path: Path) -> EngineConfig:
    """What the settings ask of the engine."""
    return EngineConfig(
        model=str(model_path),
        load_format=settings.load_format,
        packed_cache_dir=None if (folder := settings.packed_cache_folder) is None else str(folder),
        dtype=settings.dtype,
        quantization=settings.quantization,
        quantization_group=settings.quantization_group,
        kv_cache_dtype=settings.kv_cache_dtype,
        kernels=settings.kernels,
        device=settings.device,
        batch_invariant=settings.batch_invariant,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_step_ms=settings.max_step_ms,
        block_size=settings.block_size,
        kv_cache_memory_bytes=None if settings.kv_cache_memory is None else int(settings.kv_cache_memory),
        host_kv_memory_bytes=None if settings.host_kv_memory is None else int(settings.host_kv_memory),
        preemption=settings.preemption,
        num_threads=settings.threads,
        prefix_caching=settings.prefix_cache,
        fast_forward=settings.fast_forward,
        batching=settings.batching,
        scheduling_policy=settings.scheduling_policy,
        max_queue_wait_steps=settings.max_queue_wait_steps,
        executor=settings.executor,
        fake=FakeOptions(step_seconds=settings.fake_step_seconds),
    )


def _served_model(
    settings: Settings, files: ModelFiles, text: LoadedText, client: EngineClient, info: EngineInfo
) -> ServedModel:
    templates = _Templates(text)
    return ServedModel(
        names=settings.served_model_name or (files.name,),
        engine=client,
        text=ModelText(
            tokenizer=text.tokenizer,
            chat_template=templates.chosen(settings.chat_template),
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            defaults=_sampling_defaults(text),
            settings=settings,
            own_template=templates.of_source,
            grammars=GrammarCompiler(
                text.tokenizer,
                max_bytes=settings.max_grammar_bytes,
                timeout_seconds=settings.grammar_timeout_seconds,
            ),
        ),
        created=int(time.time()),
        fingerprint=fingerprint(files, info),
    )


@dataclass(frozen=True)
class _Templates:
    """Chat templates in the words of one model."""

    text: LoadedText

    def chosen(self, path: Path | None) -> ChatTemplate | None:
        """The operator's template, else the model's. Raises ModelError."""
        if path is None:
            return self.text.chat_template
        try:
            return self.of_source(path.read_text(encoding="utf-8"))
        except (OSError, ChatTemplateError) as error:
            raise ModelError(f"--chat-template {path}: {error}") from error

    def of_source(self, source: str) -> ChatTemplate:
        """Raises ChatTemplateError."""
        return ChatTemplate({"default": source}, self.text.special_texts)


def _sampling_defaults(text: LoadedText) -> SamplingDefaults:
    given = text.sampling_defaults
    plain = SamplingDefaults()
    return SamplingDefaults(
        temperature=given.get("temperature", plain.temperature),
        top_k=int(given.get("top_k", plain.top_k)),
        top_p=given.get("top_p", plain.top_p),
        min_p=given.get("min_p", plain.min_p),
        repetition_penalty=given.get("repetition_penalty", plain.repetition_penalty),
    )


def fingerprint(files: ModelFiles, info: EngineInfo) -> str:
    """Changes with the model's file, dtype, quantisation and kernels: answers may differ where it differs."""
    size = files.path.stat().st_size if files.path.is_file() else 0
    parts = (files.name, size, info.architecture, info.num_parameters, info.dtype, info.kv_cache_dtype)
    text = "|".join(map(str, (*parts, info.quantization, info.device, info.kernels)))
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]


def summary(settings: Settings, model: ServedModel, info: EngineInfo, base_url: str) -> str:
    """What was chosen, in a few lines, ending with a command that works."""
    kv_tokens = (
        f"{info.kv_capacity_tokens:,} tokens of KV cache in {info.kv_cache_dtype} "
        f"({info.kv_cache_bytes / 2**20:,.0f} MiB)"
    )
    if info.host_kv_cache_bytes:
        kv_tokens += f" and {info.host_kv_cache_bytes / 2**20:,.0f} MiB on the host"
    step = f"at most {info.max_num_seqs} sequences and {info.max_num_batched_tokens:,} tokens"
    if info.max_step_ms:
        step += f", and about {info.max_step_ms} ms: {info.step_prompt_tokens:,} tokens of a new prompt"
    lines = [
        f"model     {model.names[0]}: {info.architecture}, {info.num_parameters / 1e6:,.0f} M parameters, "
        f"{info.quantization} weights ({info.weight_bytes / 2**20:,.0f} MiB)",
        f"runs on   {info.device} in {info.dtype}: {info.kernels}; {info.num_threads} threads",
        f"memory    {kv_tokens}; context {info.max_model_len:,} tokens",
        f"step      {step}",
        f"serving   {base_url}/v1   (health: /health, ready: /ready, metrics: /metrics, API: /docs)",
        "",
        f"  curl {base_url}/v1/{_example(settings, model)}",
    ]
    return "\n".join(lines)


def _example(settings: Settings, model: ServedModel) -> str:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key or settings.api_key_file else ""
    insecure = " --insecure" if settings.tls_certificate is not None else ""
    if model.text.chat_template is None:
        path, body = "completions", '{"prompt": "The capital of France is", "max_tokens": 30}'
    else:
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 60}'
    return f"{path} -H 'Content-Type: application/json'{key}{insecure} -d '{body}'"
