"""From logits to tokens, row by row: the order of operations is KernelSet.sample's contract."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import Csr, LogprobsResult, Penalties, SamplingBatch
from kernels.reference.arrays import from_host
from kernels.reference.philox import gumbel

_NOISE_RANGE = 26.1  # the noise lies in [−3.14, 22.88]: a token further below the best cannot win
_NUCLEUS_GUESS = 1024  # most nuclei fit: sort so many first, everything only when they do not reach top_p
_NO_TOKEN = -1
_PURPOSE_DRAW = 0


def sample(logits: torch.Tensor, batch: SamplingBatch) -> npt.NDArray[np.int32]:
    """One token id per row; see KernelSet.sample."""
    num_rows = logits.shape[0]
    if num_rows == 0:
        return np.empty(0, np.int32)
    edited = any(part is not None for part in (batch.mask, batch.allowed, batch.banned, batch.bias, batch.penalties))
    if not edited and not batch.temperature.any():
        return _greedy(logits)
    return np.array([_sample_row(logits[row], batch, row) for row in range(num_rows)], np.int32)


def _greedy(logits: torch.Tensor) -> npt.NDArray[np.int32]:
    """The first largest of each row. argmax counts NaN as largest, so one look at the winner finds any NaN."""
    best = logits.argmax(dim=-1, keepdim=True)
    values = logits.gather(1, best)
    valid = ~values.isnan() & (values != -torch.inf)
    tokens: npt.NDArray[np.int32] = torch.where(valid, best, _NO_TOKEN)[:, 0].to(torch.int32).cpu().numpy()
    return tokens


def _sample_row(raw: torch.Tensor, batch: SamplingBatch, row: int) -> int:
    if bool(raw.amax().isnan()):
        return _NO_TOKEN
    logits = _edit(raw, batch, row)
    temperature = float(batch.temperature[row])
    if temperature == 0.0:
        return int(_greedy(logits[None])[0])
    scaled = logits / temperature
    best = float(scaled.amax())
    if math.isinf(best):
        return int(_greedy(scaled[None])[0])
    # every filter keeps the tokens at or above a bound, so the highest bound decides
    lowest = best - _NOISE_RANGE
    candidates = scaled
    top_k, top_p, min_p = int(batch.top_k[row]), float(batch.top_p[row]), float(batch.min_p[row])
    if 0 < top_k < scaled.shape[0]:
        kth = float(scaled.topk(top_k).values[-1])
        candidates = scaled[scaled >= kth]
        lowest = max(lowest, kth)
    if top_p < 1.0:
        lowest = max(lowest, _nucleus_bound(candidates, best, top_p))
    if min_p > 0.0:
        lowest = max(lowest, best + math.log(min_p))
    token_ids = (scaled.double() >= lowest).nonzero()[:, 0]
    noise = gumbel(
        token_ids,
        seed=int(batch.seed[row]),
        output_position=int(batch.output_position[row]),
        choice_index=int(batch.choice_index[row]),
        purpose=_PURPOSE_DRAW,
    )
    return int(token_ids[(scaled[token_ids] + noise).argmax()])


def _nucleus_bound(scaled: torch.Tensor, best: float, top_p: float) -> float:
    """The value at the first index, from the largest down, at which the probabilities' sum reaches top_p."""
    target = float((scaled.double() - best).exp_().sum()) * top_p
    num_sorted = min(_NUCLEUS_GUESS, scaled.shape[0])
    while True:
        largest = scaled.topk(num_sorted).values
        sums = (largest.double() - best).exp_().cumsum(0)
        if float(sums[-1]) >= target or num_sorted == scaled.shape[0]:
            break
        num_sorted = scaled.shape[0]
    cutoff = int((sums < target).sum())
    return float(largest[min(cutoff, num_sorted - 1)])


def _edit(raw: torch.Tensor, batch: SamplingBatch, row: int) -> torch.Tensor:
    """Masks, bias and penalties on a copy; the row itself when it has none."""
    logits = raw
    if batch.mask is not None and (index := int(batch.mask.rows[row])) >= 0:
        bits = np.unpackbits(batch.mask.bits[index].view(np.uint8), count=raw.shape[0], bitorder="little")
        logits = raw.masked_fill(_to_device(bits == 0, raw), -torch.inf)
    if batch.allowed is not None and len(allowed := _row_tokens(batch.allowed, row)):
        token_ids = _to_device(allowed, raw)
        masked = logits
        logits = torch.full_like(raw, -torch.inf)
        logits[token_ids] = masked[token_ids]
    if batch.banned is not None and len(banned := _row_tokens(batch.banned, row)):
        logits = raw.clone() if logits is raw else logits
        logits[_to_device(banned, raw)] = -torch.inf
    if batch.bias is not None:
        entries = slice(batch.bias.row_starts[row], batch.bias.row_starts[row + 1])
        token_ids = _to_device(batch.bias.token_ids[entries].astype(np.int64), raw)
        logits = raw.clone() if logits is raw else logits
        logits[token_ids] += _to_device(batch.bias.values[entries], raw)
    if batch.penalties is not None:
        logits = raw.clone() if logits is raw else logits
        _penalise(logits, batch.penalties, row)
    return logits


def _penalise(logits: torch.Tensor, penalties: Penalties, row: int) -> None:
    entries = slice(penalties.row_starts[row], penalties.row_starts[row + 1])
    token_ids = _to_device(penalties.token_ids[entries].astype(np.int64), logits)
    counts = _to_device(penalties.output_counts[entries].astype(np.float32), logits)
    repetition = float(penalties.repetition[row])
    seen = logits[token_ids]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen -= float(penalties.frequency[row]) * counts
    seen -= float(penalties.presence[row]) * (counts > 0)
    logits[token_ids] = seen


def _row_tokens(csr: Csr, row: int) -> npt.NDArray[np.int64]:
    return csr.token_ids[csr.row_starts[row] : csr.row_starts[row + 1]].astype(np.int64)


def _to_device(
    host: npt.NDArray[np.int64] | npt.NDArray[np.float32] | npt.NDArray[np.bool_], like: torch.Tensor
) -> torch.Tensor:
    return from_host(host).to(like.device)


def logprobs(logits: torch.Tensor, token_ids: npt.NDArray[np.int32], top: int) -> LogprobsResult:
    """See KernelSet.logprobs. Normalised in float64, so that a row's result is its own."""
    num_rows, vocab_size = logits.shape
    top = min(top, vocab_size)
    if num_rows == 0:
        nothing = np.empty((0, top), np.int32)
        return LogprobsResult(np.empty(0, np.float32), np.empty(0, np.int32), nothing, nothing.astype(np.float32))
    chosen = from_host(token_ids.astype(np.int64)).to(logits.device)[:, None]
    normaliser = torch.logsumexp(logits.double(), dim=-1, keepdim=True)
    value = logits.gather(1, chosen)
    above = (logits > value).sum(dim=-1)
    equal_before = ((logits == value) & (torch.arange(vocab_size, device=logits.device) < chosen)).sum(dim=-1)
    top_ids = _largest(logits, top)
    return LogprobsResult(
        logprob=(value - normaliser)[:, 0].float().cpu().numpy(),
        rank=(above + equal_before + 1).to(torch.int32).cpu().numpy(),
        top_token_ids=top_ids.to(torch.int32).cpu().numpy(),
        top_logprobs=(logits.gather(1, top_ids) - normaliser).float().cpu().numpy(),
    )


def _largest(logits: torch.Tensor, top: int) -> torch.Tensor:
    """Ids [R, top] of the largest, ties to the lowest id: topk alone leaves the order of ties open."""
    result = torch.empty((logits.shape[0], top), dtype=torch.int64, device=logits.device)
    if top == 0:
        return result
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bounds = logits.topk(top, dim=-1).values[:, -1]
    for row in range(logits.shape[0]):
        token_ids = (logits[row] >= bounds[row]).nonzero()[:, 0]
        order = logits[row][token_ids].argsort(descending=True, stable=True)
        result[row] = token_ids[order[:top]]
    return result
