"""RoPE as config.json states it: `rope_parameters`, or the older `rope_theta` beside `rope_scaling`."""

from __future__ import annotations

import math

from engine.errors import ModelError
from engine.models.hf_config import HFConfig
from engine.models.rope import (
    BandScaling,
    DynamicScaling,
    LinearScaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)


def rope_from_hf(hf: HFConfig, head_dim: int, layer_type: str = "", default_base: float = 10_000.0) -> RopeConfig:
    """The rotation of the layers of one type (`layer_type` matters only where the file has one RoPE per type).

    Raises ModelError for a kind of RoPE that is not known.
    """
    parameters = hf.section("rope_parameters") or hf.section("rope_scaling") or HFConfig(hf.path, {})
    parameters = parameters.section(layer_type) or parameters
    base = parameters.optional("rope_theta", float) or hf.get("rope_theta", float, default_base)
    share = parameters.optional("partial_rotary_factor", float) or hf.get("partial_rotary_factor", float, 1.0)
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or rotary_dim < 2:
        raise ModelError(f"{hf.path}: RoPE over {rotary_dim} of {head_dim} dimensions: not an even number")
    return RopeConfig(base, rotary_dim, _scaling(hf, parameters, rotary_dim))


def _scaling(hf: HFConfig, parameters: HFConfig, rotary_dim: int) -> RopeScaling | None:
    kind = parameters.optional("rope_type", str) or parameters.get("type", str, "default")
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(parameters.require("factor", float))
        case "dynamic":
            return DynamicScaling(parameters.require("factor", float), hf.require("max_position_embeddings", int))
        case "llama3":
            return BandScaling(
                factor=parameters.require("factor", float),
                low_freq_factor=parameters.require("low_freq_factor", float),
                high_freq_factor=parameters.require("high_freq_factor", float),
                trained_positions=_trained_positions(hf, parameters),
            )
        case "yarn":
            return _yarn(hf, parameters)
        case "longrope" | "su":  # "su" is its older name
            return _longrope(hf, parameters, rotary_dim)
        case _:
            raise ModelError(f"{hf.path}: the RoPE type {kind!r} is not known")


def _trained_positions(hf: HFConfig, parameters: HFConfig) -> int:
    key = "original_max_position_embeddings"
    found = hf.optional(key, int) or parameters.optional(key, int)
    return found or hf.require("max_position_embeddings", int)


def _yarn(hf: HFConfig, parameters: HFConfig) -> YarnScaling:
    trained = _trained_positions(hf, parameters)
    factor = parameters.optional("factor", float) or hf.require("max_position_embeddings", int) / trained
    attention_factor = parameters.optional("attention_factor", float)
    if attention_factor is None:
        mscale = parameters.optional("mscale", float)
        mscale_all = parameters.optional("mscale_all_dim", float)
        both = mscale and mscale_all
        attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all) if both else _mscale(factor, 1.0)
    return YarnScaling(
        factor=factor,
        trained_positions=trained,
        attention_factor=attention_factor,
        beta_fast=parameters.optional("beta_fast", float) or 32.0,
        beta_slow=parameters.optional("beta_slow", float) or 1.0,
        truncate=parameters.get("truncate", bool, True),
    )


def _mscale(factor: float, mscale: float | None) -> float:
    return 0.1 * (mscale or 1.0) * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(hf: HFConfig, parameters: HFConfig, rotary_dim: int) -> LongRopeScaling:
    trained = _trained_positions(hf, parameters)
    short_factors = parameters.list_of("short_factor", float, rotary_dim // 2)
    long_factors = parameters.list_of("long_factor", float, rotary_dim // 2)
    if short_factors is None or long_factors is None:
        raise ModelError(f"{hf.path}: longrope without its lists short_factor and long_factor")
    factor = parameters.optional("factor", float) or hf.require("max_position_embeddings", int) / trained
    return LongRopeScaling(
        short_factors=short_factors,
        long_factors=long_factors,
        trained_positions=trained,
        attention_factor=parameters.optional("attention_factor", float) or longrope_attention_factor(factor, trained),
    )


def longrope_attention_factor(factor: float, trained_positions: int) -> float:
    """What the paper suggests for a context stretched `factor` times."""
    return math.sqrt(1 + math.log(factor) / math.log(trained_positions)) if factor > 1 else 1.0


def context_from_hf(hf: HFConfig) -> int:
    """Tokens that the model takes: what the file says, stretched by a scaling that the file counts on top."""
    stated = hf.require("max_position_embeddings", int)
    parameters = hf.section("rope_parameters") or hf.section("rope_scaling")
    if parameters is None:
        return stated
    match parameters.optional("rope_type", str) or parameters.get("type", str, "default"):
        case "linear" | "dynamic":
            return int(stated * parameters.require("factor", float))
        case "yarn":
            trained = _trained_positions(hf, parameters)
            return max(stated, int(trained * parameters.get("factor", float, 1.0)))
        case _:
            return stated
