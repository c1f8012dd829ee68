"""What the server holds while it runs: one object, made by create_app, passed to whoever needs it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from engine.types import LoadProgress, StepStats
from monitoring.engine_state import EngineLife, resident_bytes, usage_ratio
from monitoring.metrics import Metrics
from server.access import KeyRing
from server.admission import Admission
from server.engine_port import EnginePort
from server.errors import Aborted, NotFound, NotReady, UnknownModel
from server.generation import Generation
from server.plan import ModelText
from server.settings import Settings
from server.tracing import Tracing
from server.version import version


@dataclass(frozen=True)
class ServedModel:
    """A model that can be asked."""

    names: tuple[str, ...]  # the first is its name, the others aliases
    engine: EnginePort
    text: ModelText
    created: int  # Unix seconds
    fingerprint: str  # changes with model, dtype and kernels


@dataclass(frozen=True, eq=False)
class Running:
    """A request that can be aborted by its id."""

    key: str
    generation: Generation


@dataclass(eq=False)
class Server:
    """The state of one server. Lives on one event loop."""

    settings: Settings
    keys: KeyRing
    model: ServedModel | None = None
    progress: LoadProgress = field(default_factory=lambda: LoadProgress("starting", 0.0))
    draining: bool = False

    def __post_init__(self) -> None:
        self.started_at = time.monotonic()
        self.tracing = Tracing.from_settings(self.settings)
        self.metrics = Metrics(version(), self.latest_step, self.engine_life)
        self.admission = Admission(self.settings, self._num_waiting, self.metrics.refused)
        self._running: dict[str, list[Running]] = {}

    def latest_step(self) -> StepStats | None:
        """The engine's; None before its first step."""
        return self.model.engine.stats() if self.model is not None else None

    def engine_life(self) -> EngineLife:
        """What is known of the engine processes, now."""
        if self.model is None:
            return EngineLife()
        engine = self.model.engine
        counters = engine.counters
        return EngineLife(
            counters.restarts,
            counters.replayed_choices,
            counters.failed_choices,
            counters.dropped_tokens,
            engine.longest_wait_seconds(),
            engine.engine_pid,
        )

    def _num_waiting(self) -> int:
        step = self.latest_step()
        return step.num_waiting if step is not None else 0

    def note_progress(self, progress: LoadProgress) -> None:
        self.progress = progress

    def start_serving(self, model: ServedModel) -> None:
        """From now on requests are taken."""
        self.model = model
        model.engine.add_step_listener(
            lambda stats, begun: self.metrics.step_done(stats, len(begun.seq_ids), model.engine.counters.restarts)
        )
        if self.tracing is not None:
            model.engine.add_step_listener(self.tracing.note_step)
        if (info := model.engine.info) is not None:
            self.metrics.model_ready(model.names[0], info)

    # Readiness

    @property
    def ready(self) -> bool:
        """Whether a request would be served now."""
        return self.model is not None and not self.draining and self.model.engine.status.ready

    def figures(self) -> dict[str, Any]:
        """What /health says beside that the process lives."""
        step, life = self.latest_step(), self.engine_life()
        info = self.model.engine.info if self.model is not None else None
        return {
            "ready": self.ready,
            "uptime_seconds": round(time.monotonic() - self.started_at, 1),
            "running": step.num_running if step is not None else 0,
            "waiting": step.num_waiting if step is not None else 0,
            "oldest_waiting_seconds": round(life.longest_wait_seconds, 3),
            "engine_restarts": life.restarts,
            "memory": {
                "server_bytes": resident_bytes("self"),
                "engine_bytes": None if life.pid is None else resident_bytes(life.pid),
                "kv_cache_bytes": info.kv_cache_bytes if info is not None else 0,
                "kv_usage_ratio": round(usage_ratio(step), 4),
            },
        }

    def not_ready_reason(self) -> str:
        """Fit for a client."""
        if self.draining:
            return "The server is shutting down"
        if self.model is None:
            return f"The model is still loading ({self.progress.stage}, {self.progress.fraction:.0%})"
        return f"The engine is not ready: {self.model.engine.status.reason}"

    def serving(self) -> ServedModel:
        """The model, if requests are taken; while the engine restarts they are. Raises NotReady."""
        if self.model is None or self.draining:
            raise NotReady(self.not_ready_reason())
        return self.model

    def metrics_response(self, accept: str) -> Response:
        """The exposition, as of now, in the format that suits an Accept header best."""
        self.metrics.set_ready(self.ready)
        text, content_type = self.metrics.render(accept)
        return Response(text, media_type=content_type)

    def model_named(self, name: str | None) -> ServedModel:
        """The model a request asks for; None takes what there is. Raises NotReady, UnknownModel."""
        model = self.serving()
        if name is not None and name not in model.names:
            raise UnknownModel(
                f"No model {name!r} is served here. Known: {', '.join(model.names)}. `model` may also be left out",
                param="model",
            )
        return model

    # Requests in progress

    @contextlib.contextmanager
    def abortable(self, ids: tuple[str, ...], running: Running) -> Iterator[None]:
        """While the block runs the request can be aborted by any of its ids, which need not be unique."""
        for one in ids:
            self._running.setdefault(one, []).append(running)
        try:
            yield
        finally:
            for one in ids:
                self._running[one].remove(running)
                if not self._running[one]:
                    del self._running[one]

    def abort(self, request_id: str, key: str) -> None:
        """End the requests of this key that have this id. Raises NotFound."""
        found = [running for running in self._running.get(request_id, ()) if running.key == key]
        if not found:
            raise NotFound(f"No request {request_id!r} is in progress", param="request_id")
        for running in found:
            running.generation.abort(Aborted("The request was aborted"), "request")

    def abort_all(self, reason: str) -> None:
        """End everything that is in progress, with a 503."""
        for running in [running for same in self._running.values() for running in same]:
            running.generation.abort(NotReady(reason), "shutdown")
