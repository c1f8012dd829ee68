"""What a model is, what it needs, whether it fits here, and why it cannot be served: for `octavo inspect MODEL`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError
from engine.models.config import LayerConfig, ModelConfig, MoEConfig, kv_groups, num_parameters
from engine.models.loader import OpenedModel, check_weights, open_model
from engine.models.rope import LongRopeScaling, RopeConfig
from engine.models.source import PLAIN_DTYPES
from kernels.interface import DType

_VALUE_BYTES = {DType.FLOAT32: 4, DType.FLOAT16: 2, DType.BFLOAT16: 2}


@dataclass(frozen=True, slots=True)
class KVGroupReport:
    """What a token leaves in the cache of one group of layers."""

    window: int | None
    num_layers: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class FitReport:
    """Needed memory against what is free. Float weights and KV are counted in `dtype`, quantised weights at their own
    bits. The KV of a sequence stops growing where its layers slide."""

    available_bytes: int
    weight_bytes: int
    context_bytes: int  # KV of one full context
    num_contexts: int  # full contexts that fit beside the weights
    longest_context: int  # tokens of one sequence that fit beside the weights, at most the model's context


@dataclass(frozen=True, slots=True)
class ModelReport:
    """`config` is None where the configuration itself could not be read; `problem` says why it cannot be served."""

    path: Path
    problem: str | None
    dtype: DType
    family: str = ""
    config: ModelConfig | None = None
    num_parameters: int = 0
    file_bytes: int = 0
    formats: tuple[tuple[str, int], ...] = ()  # (format, bytes), most bytes first
    kv_groups: tuple[KVGroupReport, ...] = ()
    fit: FitReport | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.kv_groups)


def inspect_model(path: Path, available_bytes: int, dtype: DType = DType.BFLOAT16) -> ModelReport:
    """Reads headers only. FitReport says what `dtype` counts; `available_bytes` is the memory that may be taken.

    Never raises ModelError: the report carries it.
    """
    try:
        files = open_model(path)
    except ModelError as error:
        return ModelReport(path, str(error), dtype)
    problem = None
    try:
        check_weights(files)
    except ModelError as error:
        problem = str(error)
    return _report(files, problem, available_bytes, dtype)


def _report(files: OpenedModel, problem: str | None, available_bytes: int, dtype: DType) -> ModelReport:
    config, value_bytes = files.config, _VALUE_BYTES[dtype]
    groups = tuple(
        KVGroupReport(
            window=group.window,
            num_layers=len(group.layers),
            bytes_per_token=2 * len(group.layers) * group.num_kv_heads * group.head_dim * value_bytes,
        )
        for group in kv_groups(config)
    )
    formats = files.source.formats() if files.source else {}
    weight_bytes = sum(
        num_bytes // PLAIN_DTYPES[name].itemsize * value_bytes if name in PLAIN_DTYPES else num_bytes
        for name, num_bytes in formats.items()
    )
    return ModelReport(
        path=files.path,
        problem=problem,
        dtype=dtype,
        family=files.family,
        config=config,
        num_parameters=num_parameters(config),
        file_bytes=files.source.total_bytes if files.source else 0,
        formats=tuple(sorted(formats.items(), key=lambda item: -item[1])),
        kv_groups=groups,
        fit=_fit(groups, config.context_length, weight_bytes, available_bytes),
    )


def _fit(groups: tuple[KVGroupReport, ...], context: int, weight_bytes: int, available_bytes: int) -> FitReport:
    def kv_bytes(num_tokens: int) -> int:
        return sum(group.bytes_per_token * min(num_tokens, group.window or num_tokens) for group in groups)

    left = max(0, available_bytes - weight_bytes)
    fitting, too_long = 0, context + 1
    while too_long - fitting > 1:  # kv_bytes grows with the length: bisection
        middle = (fitting + too_long) // 2
        fitting, too_long = (middle, too_long) if kv_bytes(middle) <= left else (fitting, middle)
    return FitReport(
        available_bytes=available_bytes,
        weight_bytes=weight_bytes,
        context_bytes=kv_bytes(context),
        num_contexts=left // kv_bytes(context),
        longest_context=fitting,
    )


def render(report: ModelReport) -> str:
    """The report as lines for a terminal."""
    lines = [str(report.path)]
    if report.config is not None and report.fit is not None:
        facts = _facts(report, report.config, report.fit)
        lines += [f"  {name:<13} {text}" for name, text in facts]
    verdict = "yes" if report.problem is None else f"no: {report.problem}"
    return "\n".join([*lines, f"  {'can be served':<13} {verdict}"])


def _facts(report: ModelReport, config: ModelConfig, fit: FitReport) -> Iterator[tuple[str, str]]:
    yield "architecture", f"{config.architecture} (family {report.family}), {_count(report.num_parameters)} parameters"
    formats = ", ".join(f"{name} {_size(num_bytes)}" for name, num_bytes in report.formats)
    yield "weights", f"{_size(report.file_bytes)} on disk: {formats}"
    yield "shape", _shape(config)
    if config.moe is not None:
        yield "experts", _experts(config, config.moe)
    yield "attention", "; ".join(_sight(group) for group in report.kv_groups)
    yield "positions", "; ".join(dict.fromkeys(_position(config, layer) for layer in config.layers))
    yield "context", f"{config.context_length:,} tokens"
    yield "KV cache", f"{report.kv_bytes_per_token:,} bytes a token in {report.dtype}"
    yield "needs", f"{_size(fit.weight_bytes)} of weights, {_size(fit.context_bytes)} of KV a full context"
    yield "fits here", _fits(config, fit)


def _shape(config: ModelConfig) -> str:
    has_dense = not all(layer.sparse for layer in config.layers)
    mlp = f"MLP {config.intermediate_size:,}, " if has_dense else ""
    return (
        f"{len(config.layers)} layers, hidden {config.hidden_size:,}, {config.num_heads} query and "
        f"{config.num_kv_heads} KV heads of {config.head_dim}, {mlp}vocabulary {config.vocab_size:,}"
    )


def _experts(config: ModelConfig, moe: MoEConfig) -> str:
    shared = " and a shared one" if moe.shared_intermediate_size else ""
    num_sparse = sum(layer.sparse for layer in config.layers)
    return (
        f"{moe.num_experts_per_token} of {moe.num_experts}{shared} a token, MLP {moe.intermediate_size:,}, in "
        f"{num_sparse} layers"
    )


def _sight(group: KVGroupReport) -> str:
    reach = "the whole context" if group.window is None else f"{group.window:,} tokens back"
    return f"{group.num_layers} layers see {reach}"


def _position(config: ModelConfig, layer: LayerConfig) -> str:
    if layer.rope is not None:
        return _rope(layer.rope)
    return "learned" if config.learned_positions else "none in some layers"


def _rope(rope: RopeConfig) -> str:
    text = f"RoPE base {rope.base:,.0f} over {rope.rotary_dim} dimensions"
    if rope.scaling is None:
        return text
    text += f", {type(rope.scaling).__name__.removesuffix('Scaling').lower()} scaling"
    if isinstance(rope.scaling, LongRopeScaling):
        trained = f"{rope.scaling.trained_positions:,}"
        text += f" (served with more than {trained} tokens of context, its long factors hold for every request)"
    return text


def _fits(config: ModelConfig, fit: FitReport) -> str:
    free = f"in the {_size(fit.available_bytes)} that are free"
    if fit.longest_context == 0:
        return f"no: weights and one token do not fit {free}"
    if fit.num_contexts == 0:
        return (
            f"in part: {fit.longest_context:,} of {config.context_length:,} tokens of context beside the weights {free}"
        )
    return f"yes: {fit.num_contexts:,} full contexts beside the weights {free}"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return str(number)


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} bytes"
