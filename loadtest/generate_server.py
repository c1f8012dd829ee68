"""A baseline to measure against: transformers' own `generate`, one request at a time, behind /v1/completions.

python -m loadtest.generate_server --model FOLDER_OR_GGUF --port 8001 --dtype bfloat16 --threads 2

Greedy; the end of text is ignored, so that every request yields exactly max_tokens tokens. One event a token. With
--no-kv-cache every token runs all tokens before it again: the plainest generation there is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route


class TokenStreamer:
    """What generate() calls with each new token; the first call carries the prompt and is passed over."""

    def __init__(self, deliver: Callable[[int | None], None]) -> None:
        self._deliver = deliver
        self._saw_prompt = False

    def put(self, value: Any) -> None:
        if self._saw_prompt:
            self._deliver(int(value.reshape(-1)[0]))
        self._saw_prompt = True

    def end(self) -> None:
        self._deliver(None)


class Baseline:
    """A loaded model and the lock that lets one request at a time use it."""

    def __init__(self, model: str, dtype: str, threads: int, *, use_cache: bool) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read by torch when transformers loads it
        import transformers

        path = Path(model)
        where = {"gguf_file": path.name} if path.is_file() else {}
        folder = str(path.parent if path.is_file() else path)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **where)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where)
        self._use_cache = use_cache
        self._lock = asyncio.Lock()

    async def tokens(self, prompt: str, max_tokens: int) -> AsyncIterator[int]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[int | None] = asyncio.Queue()

        def deliver(token: int | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, token)

        streamer = TokenStreamer(deliver)
        inputs = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        async with self._lock:
            done = asyncio.create_task(
                asyncio.to_thread(
                    self.model.generate,
                    **inputs,
                    streamer=streamer,
                    do_sample=False,
                    use_cache=self._use_cache,
                    max_new_tokens=max_tokens,
                    min_new_tokens=max_tokens,
                )
            )
            while (token := await queue.get()) is not None:
                yield token
            await done

    async def events(self, prompt: str, max_tokens: int) -> AsyncIterator[str]:
        num_tokens = 0
        async for token in self.tokens(prompt, max_tokens):
            num_tokens += 1
            yield _event(text=self.tokenizer.decode([token]), finish_reason=None)
        yield _event(text="", finish_reason="length")
        usage = {"prompt_tokens": len(self.tokenizer(prompt).input_ids), "completion_tokens": num_tokens}
        yield f"data: {json.dumps({'object': 'text_completion', 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


def _event(*, text: str, finish_reason: str | None) -> str:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return f"data: {json.dumps({'object': 'text_completion', 'choices': [choice]})}\n\n"


def create_app(baseline: Baseline) -> Starlette:
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        events = baseline.events(str(body["prompt"]), int(body.get("max_tokens", 16)))
        return StreamingResponse(events, media_type="text/event-stream")

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-kv-cache", action="store_true", help="keep no keys and values between tokens")
    args = parser.parse_args()
    baseline = Baseline(args.model, args.dtype, args.threads, use_cache=not args.no_kv_cache)
    uvicorn.run(create_app(baseline), host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
