"""The whole application over a real engine process with scripted tokens, in the toy's vocabulary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import httpx
from fastapi import FastAPI

from engine.client import EngineClient
from engine.config import EngineConfig, FakeOptions
from server.app import create_app
from server.settings import Settings
from server.state import ServedModel, Server
from tests.server.toy import samples, toy_model


@dataclass(eq=False)
class FakeServed:
    """The application, its engine and a client of it."""

    app: FastAPI
    engine: EngineClient
    http: httpx.AsyncClient

    @property
    def server(self) -> Server:
        return cast(Server, self.app.state.server)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def metrics(self) -> dict[str, float]:
        return samples((await self.http.get("/metrics")).text)

    async def until(self, condition: Any) -> None:
        """Poll, because what is awaited happens in another process."""
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@asynccontextmanager
async def fake_served(
    fake: FakeOptions, engine: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[FakeServed]:
    """Started, loaded, and stopped at the end."""
    client = EngineClient(EngineConfig("", executor="fake", fake=fake, **(engine or {})))
    chosen = Settings(**settings)

    async def load(report: Any) -> ServedModel:
        await client.start()
        await client.wait_ready()
        return toy_model(cast(Any, client), chosen)

    app = create_app(chosen, load)
    async with app.router.lifespan_context(app):
        served = FakeServed(
            app, client, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy", timeout=60)
        )
        async with served.http:
            await served.until(lambda: served.server.model is not None)
            yield served
