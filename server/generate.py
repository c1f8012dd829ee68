"""`octavo generate`: one answer in the terminal, through the same path that a request takes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time

from pydantic import ValidationError
from rich.console import Console

from engine.errors import EngineError
from monitoring.metrics import Metrics
from server.errors import ApiError, from_validation
from server.flags import Wish
from server.generation import Generation
from server.model_store import ModelNotFound
from server.progress import progress_shown
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.service import Job
from server.settings import Settings
from server.startup import load_model
from server.state import ServedModel
from server.translate.chat import ChatJob
from server.translate.completions import CompletionJob
from server.version import version


def generate(settings: Settings, wish: Wish) -> int:
    """Print one answer; the process's exit code."""
    try:
        return asyncio.run(_run(settings, wish))
    except (ModelNotFound, EngineError, ApiError) as error:
        Console(stderr=True).print(f"octavo: {error}", style="bold red", markup=False, highlight=False)
        return 1


async def _run(settings: Settings, wish: Wish) -> int:
    model = await _load(settings)
    try:
        generation = _start(model, _job(model, wish))
        async with contextlib.aclosing(generation.parts()) as parts:
            async for part in parts:
                sys.stdout.write(part.text)
                sys.stdout.flush()
        sys.stdout.write("\n")
    finally:
        await model.engine.close()
    return 0


async def _load(settings: Settings) -> ServedModel:
    with progress_shown(Console(stderr=True)) as show:
        return await load_model(settings, show)


def _job(model: ServedModel, wish: Wish) -> Job:
    sampling = {"max_tokens": wish.max_tokens, "temperature": wish.temperature, "seed": wish.seed}
    try:
        if wish.raw or model.text.chat_template is None:
            return CompletionJob(CompletionRequest.model_validate({"prompt": wish.prompt, **sampling}))
        system = [] if wish.system is None else [{"role": "system", "content": wish.system}]
        messages = [*system, {"role": "user", "content": wish.prompt}]
        return ChatJob(ChatRequest.model_validate({"messages": messages, **sampling}))
    except ValidationError as error:
        raise from_validation([{**problem, "loc": ("", *problem["loc"])} for problem in error.errors()]) from error


def _start(model: ServedModel, job: Job) -> Generation:
    return Generation(
        engine=model.engine,
        tokenizer=model.text.tokenizer,
        plan=job.plan(model.text, lambda: secrets.randbits(64)),
        metrics=Metrics(version(), model.engine.stats),
        arrived=time.monotonic(),
        starts_text=job.starts_text,
        charge=lambda num_tokens: None,
    )
