"""/v1/embeddings: request → Plan; vectors → response."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import orjson

from engine.types import Pooling, SamplingParams
from server.errors import InvalidRequest
from server.generation import Answer, Generation, Part
from server.plan import ModelText, Plan, Prompt
from server.protocol.embeddings import EmbeddingRequest
from server.sse import error_frame
from server.translate.completions import encode, prompt_list
from server.translate.parts import ResponseHead, Timings
from server.translate.sampling import SeedSource, fit_prompt


@dataclass(frozen=True)
class EmbeddingJob:
    """See service.Job."""

    body: EmbeddingRequest
    id_prefix: ClassVar[str] = "embd-"
    starts_text: ClassVar[bool] = False

    @property
    def request_id(self) -> str | None:
        return self.body.request_id

    @cached_property
    def _inputs(self) -> list[str | list[int]]:
        return prompt_list(self.body.input)

    def num_choices(self) -> int:
        return len(self._inputs)

    def num_chars(self) -> int:
        return sum(map(len, self._inputs))

    def plan(self, model: ModelText, draw_seed: SeedSource) -> Plan:
        limit = model.settings.max_inputs
        if len(self._inputs) > limit:
            raise InvalidRequest(f"input: {len(self._inputs)} inputs, at most {limit} are allowed", param="input")
        if not all(self._inputs):
            raise InvalidRequest("input: must not be empty", param="input")
        return Plan(
            prompts=tuple(self._fit(text, model) for text in self._inputs),
            sampling=SamplingParams(max_tokens=0),
            seeds=(0,) * len(self._inputs),
            pooling=Pooling.LAST if self.body.pooling == "last" else Pooling.MEAN,
        )

    def _fit(self, text: str | list[int], model: ModelText) -> Prompt:
        special = self.body.add_special_tokens is not False
        tokens = encode(text, "input", model.tokenizer, add_special_tokens=special) if isinstance(text, str) else text
        return fit_prompt(
            tokens,
            model,
            param="input",
            max_tokens=0,
            max_tokens_param="input",
            default_max_tokens=0,
            truncate=self.body.truncate_prompt_tokens,
        )

    def text_offsets(self, plan: Plan, model: ModelText) -> list[int]:
        return []

    def writer(self, head: ResponseHead, generation: Generation) -> EmbeddingWriter:
        return EmbeddingWriter(self.body, head, generation)

    def error_event(self, error: Exception, writer: object) -> bytes:
        return error_frame(error)


@dataclass(frozen=True)
class EmbeddingWriter:
    """The response of one embeddings request; it is never streamed."""

    body: EmbeddingRequest
    head: ResponseHead
    generation: Generation

    def part(self, part: Part) -> bytes:
        return b""

    def closing(self, timings: Timings) -> bytes:
        return b""

    def response(self, answers: Sequence[Answer], timings: Timings) -> bytes:
        """Raises InvalidRequest if more dimensions are asked for than there are."""
        vectors = normalized(np.array(self.generation.embeddings, np.float32), self.body.dimensions)
        num_tokens = self.generation.num_prompt_tokens
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        body = {"object": "list", "data": data, "model": self.head.model, "usage": usage}
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

    def _encoded(self, vector: np.ndarray[Any, np.dtype[np.float32]]) -> object:
        """Little-endian float32 in base64, as the official client asks, or numbers."""
        if self.body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return vector


def normalized(
    vectors: np.ndarray[Any, np.dtype[np.float32]], dimensions: int | None
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows [num_inputs, hidden] cut to `dimensions` and made unit length. Raises InvalidRequest."""
    if dimensions is not None:
        if dimensions > vectors.shape[1]:
            raise InvalidRequest(
                f"dimensions: {dimensions}, but this model's embeddings have {vectors.shape[1]}", param="dimensions"
            )
        vectors = vectors[:, :dimensions]
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.maximum(lengths, np.float32(1e-12)), np.float32)
