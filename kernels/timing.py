"""How long each operation of a forward pass takes: for the few steps that are looked at closely."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# The operations of KernelSet that a forward pass is made of.
OPERATIONS = (
    "embedding",
    "rms_norm",
    "layer_norm",
    "add",
    "add_gated",
    "linear",
    "gated_activation",
    "gated_mlp",
    "activation",
    "soft_cap",
    "scale",
    "gather_rows",
    "rope_and_store_kv",
    "paged_attention",
    "route_experts",
    "grouped_linear",
    "combine_experts",
)


class OperationTime(NamedTuple):
    """One operation; seconds since the begin of the pass."""

    name: str
    begin: float
    end: float


@contextlib.contextmanager
def watched(kernels: Any, begun: Callable[[str], None], ended: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, both are told of each operation of these kernels; one within another is part of it.

    The operations are shadowed on the instance, so that they cost nothing more at other times."""
    depth = 0

    def shadow(name: str, operation: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(operation)
        def told(*arguments: Any, **named: Any) -> None:
            nonlocal depth
            if depth:
                operation(*arguments, **named)
                return
            depth += 1
            begun(name)
            try:
                operation(*arguments, **named)
            finally:
                depth -= 1
                ended(name)

        return told

    shadows = {name: shadow(name, getattr(kernels, name)) for name in OPERATIONS if hasattr(kernels, name)}
    vars(kernels).update(shadows)
    try:
        yield
    finally:
        for name in shadows:
            del vars(kernels)[name]
