"""Norms, activations and rotation: operations on each token alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.interface import Activation, RopeSpec


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """Computed in float32 from the (rounded) sum with the residual. `eps` is a float32 scalar."""
    if residual is not None:
        x = residual.add_(x)
    norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
    inverse = torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    normalised = x * inverse
    if out.dtype == torch.float32:
        torch.mul(normalised, weight, out=out)
    else:
        out.copy_(normalised.mul_(weight))


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    residual: torch.Tensor | None,
) -> None:
    """Computed in float32 from the (rounded) sum with the residual."""
    if residual is not None:
        x = residual.add_(x)
    out.copy_(F.layer_norm(x.float(), weight.shape, weight, bias, eps))


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """act(x) as a new tensor of x's type."""
    match activation:
        case Activation.SILU:
            return F.silu(x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.RELU:
            return F.relu(x)


def rotation_rows(cos_sin: torch.Tensor, positions: torch.Tensor, rope: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of each token, broadcastable to its heads' pairs: −sin for the first of a pair.

    Both [T, 1, 2, rotary_dim / 2] for pairs (i, i + rotary_dim/2), [T, 1, rotary_dim / 2, 2] when interleaved.
    """
    rows = cos_sin.index_select(0, positions).unsqueeze(1)
    cos, sin = rows.chunk(2, dim=-1)
    pair = -1 if rope.interleaved else -2
    return torch.stack((cos, cos), dim=pair), torch.stack((-sin, sin), dim=pair)


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, rope: RopeSpec) -> None:
    """Rotate the first rotary_dim of each head in place. x [T, heads, D].

    Product, product, sum, each rounded once: no fused multiply-add whose use could depend on the shape, so that a
    row's result is the same bits whatever stands beside it.
    """
    num_tokens, num_heads, _ = x.shape
    half = rope.rotary_dim // 2
    shape = (num_tokens, num_heads, half, 2) if rope.interleaved else (num_tokens, num_heads, 2, half)
    pairs = x[..., : rope.rotary_dim].view(shape)
    swapped = pairs.flip(-1 if rope.interleaved else -2)
    rotated = pairs * cos
    rotated += swapped * signed_sin
    pairs.copy_(rotated)
