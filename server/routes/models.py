"""Which models there are."""

from __future__ import annotations

from server.protocol.common import ModelCard, ModelList
from server.routes.base import ServerDep, router
from server.state import ServedModel

routes = router("OpenAI")


def _card(model: ServedModel, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=model.created,
        owned_by="octavo",
        root=model.names[0],
        max_model_len=model.text.max_model_len,
    )


@routes.get("/v1/models")
async def list_models(server: ServerDep) -> ModelList:
    """The model under each of its names."""
    model = server.serving()
    return ModelList(data=[_card(model, name) for name in model.names])


@routes.get("/v1/models/{name:path}")
async def get_model(name: str, server: ServerDep) -> ModelCard:
    """One model by its name."""
    return _card(server.model_named(name), name)
