"""The one decoder: every family runs through it, what differs stands in ModelConfig.

          tokens ─▶ embedding (+ learned positions) ─▶ h
    layer:  h ─▶ [pre norm] ─▶ qkv ─▶ [q/k norm] ─▶ rope, store k and v ─▶ attention ─▶ o ─▶ [post norm] ─▶ + h
            h ─▶ [pre norm] ─▶ dense MLP or experts                                      ─▶ [post norm] ─▶ + h
          h ─▶ final norm ─▶ hidden states ─▶ (chosen rows) head ─▶ logits

Arithmetic is the kernels' alone. Buffers are made once, for the largest step; a forward pass works on their first
rows, so that steps of one shape class run the same operations at the same addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.models.config import KVGroup, ModelConfig, MoEConfig, NormKind, QKNorm, kv_groups
from engine.models.forward_batch import ForwardBatch
from engine.models.rope import RopeConfig, cos_sin_table
from engine.models.weights import (
    AttentionWeights,
    DecoderWeights,
    DenseWeights,
    ExpertWeights,
    LayerWeights,
    NormWeights,
)
from kernels.interface import Array, AttentionSpec, DType, KernelSet, RopeSpec
from kernels.timing import OperationTime


@dataclass(frozen=True, slots=True)
class _LayerPlace:
    """Where a layer keeps its keys and values, and how it sees."""

    group: int
    layer_in_group: int
    cos_sin: Array | None
    rope: RopeSpec | None
    attention: AttentionSpec


class Workspace:
    """Buffers for the largest step, of `num_rows` tokens."""

    def __init__(self, config: ModelConfig, kernels: KernelSet, num_rows: int) -> None:
        def buffer(*shape: int, dtype: DType = kernels.activation_dtype) -> Array:
            return kernels.empty((num_rows, *shape), dtype)

        self.num_rows = num_rows
        self.residual = buffer(config.hidden_size)
        self.normed = buffer(config.hidden_size)
        self.post_normed = buffer(config.hidden_size if config.post_norm else 0)
        self.branch = buffer(config.hidden_size)
        self.hidden = buffer(config.hidden_size)  # the result; nothing else writes there
        self.qkv = buffer(config.q_size + 2 * config.kv_size)
        self.attention = buffer(config.q_size)
        shared_size = config.moe.shared_intermediate_size if config.moe else 0
        size = max(config.intermediate_size, shared_size)
        self.up = buffer(2 * size if config.gated_mlp else 0)
        self.activated = buffer(size)
        self.experts = _ExpertWorkspace(config, config.moe, kernels, num_rows) if config.moe else None


class _ExpertWorkspace:
    """Buffers of the sparse layers; rows are tokens."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, kernels: KernelSet, rows: int) -> None:
        def buffer(*shape: int, dtype: DType = kernels.activation_dtype) -> Array:
            return kernels.empty((rows, *shape), dtype)

        top_k = moe.num_experts_per_token
        sparse = [index for index, layer in enumerate(config.layers) if layer.sparse]
        self.ids = {index: buffer(top_k, dtype=DType.INT32) for index in sparse}  # kept apart to be counted
        self.logits = buffer(moe.num_experts, dtype=DType.FLOAT32)
        self.weights = buffer(top_k, dtype=DType.FLOAT32)
        self.up = buffer(top_k, 2 * moe.intermediate_size)
        self.activated = buffer(top_k, moe.intermediate_size)
        self.down = buffer(top_k, config.hidden_size)
        self.shared = buffer(config.hidden_size)
        self.shared_gate = buffer(1, dtype=DType.FLOAT32)


class Decoder:
    """A loaded model, served with contexts of `max_model_len` tokens: rotations may depend on it. Not thread-safe: one
    caller at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kernels: KernelSet,
        workspace: Workspace,
        max_model_len: int,
    ) -> None:
        self.config = config
        self.kv_groups: tuple[KVGroup, ...] = kv_groups(config)
        self._identity = object()  # two models on one KernelSet have shape classes apart
        self._weights = weights
        self._kernels = kernels
        self.max_num_batched_tokens = workspace.num_rows
        self._workspace = workspace
        self._places = self._place_layers(max_model_len)

    def forward(self, batch: ForwardBatch, times: list[OperationTime] | None = None) -> Array:
        """The final, normalised hidden states [num_tokens, H] in the compute dtype; valid until the next call.

        Writes the step's keys and values into the groups' caches. At most max_num_batched_tokens tokens, at
        positions below max_model_len. `times`: each operation is waited for, and added where it can be told.
        """
        if batch.num_tokens > self.max_num_batched_tokens:
            raise ValueError(f"{batch.num_tokens} tokens in a step; buffers hold {self.max_num_batched_tokens}")
        shape_class = (self._identity, batch.shape_class)
        if times is None:
            self._kernels.run(shape_class, lambda: self._forward(batch))
        else:
            times += self._kernels.run_timed(shape_class, lambda: self._forward(batch))
        return self._workspace.hidden[: batch.num_tokens]

    def logits(self, hidden: Array, out: Array) -> None:
        """out = head(hidden), scaled and capped as the model does. hidden [R, H], out float32 [R, V]."""
        self._kernels.linear(hidden, self._weights.head, out)
        if self.config.logit_scale != 1.0:
            self._kernels.scale(out, self.config.logit_scale)
        if self.config.logit_soft_cap is not None:
            self._kernels.soft_cap(out, self.config.logit_soft_cap)

    def expert_counts(self, num_tokens: int) -> npt.NDArray[np.int64] | None:
        """How many of the last step's first `num_tokens` tokens each expert took, [sparse layers, E]; None for a
        dense model. Waits for the step."""
        if self.config.moe is None or self._workspace.experts is None:
            return None
        num_experts = self.config.moe.num_experts
        taken = [self._kernels.download(ids[:num_tokens]).ravel() for ids in self._workspace.experts.ids.values()]
        return np.stack([np.bincount(experts.astype(np.int64), minlength=num_experts) for experts in taken])

    def _place_layers(self, max_model_len: int) -> tuple[_LayerPlace, ...]:
        config = self.config
        ropes = dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None)
        tables: dict[RopeConfig, Array] = {
            rope: self._kernels.upload(cos_sin_table(rope, max_model_len)) for rope in ropes
        }
        places: list[_LayerPlace] = []
        for index, layer in enumerate(config.layers):
            group = next(g for g, group in enumerate(self.kv_groups) if index in group.layers)
            places.append(
                _LayerPlace(
                    group=group,
                    layer_in_group=self.kv_groups[group].layers.index(index),
                    cos_sin=tables[layer.rope] if layer.rope else None,
                    rope=RopeSpec(layer.rope.rotary_dim, layer.rope.interleaved) if layer.rope else None,
                    attention=AttentionSpec(config.attention_scale, layer.window, config.attention_soft_cap),
                )
            )
        return tuple(places)

    def _forward(self, batch: ForwardBatch) -> None:
        num_tokens, work = batch.num_tokens, self._workspace
        residual = work.residual[:num_tokens]
        self._kernels.embedding(batch.token_ids, self._weights.embedding, residual, self.config.embedding_scale)
        if self._weights.positions is not None:
            self._kernels.embedding(batch.positions, self._weights.positions, residual, accumulate=True)
        pending: Array | None = None  # a branch's output that is still to be added to the residual
        for index, layer in enumerate(self._weights.layers):
            x = self._enter(layer.attention_norm, residual, pending)
            pending = self._attention(batch, index, layer.attention, x)
            pending = self._leave(layer.attention_post_norm, pending)
            x = self._enter(layer.mlp_norm, residual, pending)
            pending = self._mlp(index, layer, x)
            pending = self._leave(layer.mlp_post_norm, pending)
        self._norm(self._weights.final_norm, residual, pending, work.hidden[:num_tokens])

    def _enter(self, norm: NormWeights | None, residual: Array, pending: Array | None) -> Array:
        """Add what is pending to the residual; its normalised form, or itself where a branch has no pre norm."""
        if norm is None:
            if pending is not None:
                self._kernels.add(residual, pending)
            return residual
        normed = self._workspace.normed[: residual.shape[0]]
        self._norm(norm, residual, pending, normed)
        return normed

    def _leave(self, norm: NormWeights | None, branch: Array) -> Array:
        """A branch's output as it is added to the residual."""
        if norm is not None:
            normed = self._workspace.post_normed[: branch.shape[0]]
            self._norm(norm, branch, None, normed)
            branch = normed
        if self.config.residual_scale != 1.0:
            self._kernels.scale(branch, self.config.residual_scale)
        return branch

    def _norm(self, norm: NormWeights, x: Array, pending: Array | None, out: Array) -> None:
        """x += pending, if there is something pending; out = norm(x)."""
        source, residual = (x, None) if pending is None else (pending, x)
        if self.config.norm is NormKind.RMS:
            self._kernels.rms_norm(source, norm.weight, self.config.norm_eps, out, residual)
        else:
            self._kernels.layer_norm(source, norm.weight, norm.bias, self.config.norm_eps, out, residual)

    def _attention(self, batch: ForwardBatch, index: int, weights: AttentionWeights, x: Array) -> Array:
        config, kernels, place = self.config, self._kernels, self._places[index]
        num_tokens, group = batch.num_tokens, batch.groups[place.group]
        qkv = self._workspace.qkv[:num_tokens]
        kernels.linear(x, weights.qkv, qkv)
        flat_q, flat_k = qkv[:, : config.q_size], qkv[:, config.q_size : config.q_size + config.kv_size]
        q = flat_q.reshape(num_tokens, config.num_heads, config.head_dim)
        k = flat_k.reshape(num_tokens, config.num_kv_heads, config.head_dim)
        v = qkv[:, config.q_size + config.kv_size :].reshape(num_tokens, config.num_kv_heads, config.head_dim)
        if config.qk_norm is not QKNorm.NONE:
            per_head = config.qk_norm is QKNorm.PER_HEAD
            for values, weight in (
                (q if per_head else flat_q, weights.q_norm),
                (k if per_head else flat_k, weights.k_norm),
            ):
                kernels.rms_norm(values, weight, config.norm_eps, values)
        kernels.rope_and_store_kv(
            q,
            k,
            v,
            batch.positions,
            place.cos_sin,
            place.rope,
            group.kv_cache,
            place.layer_in_group,
            group.slot_mapping,
        )
        attended = self._workspace.attention[:num_tokens]
        kernels.paged_attention(
            q,
            group.kv_cache,
            place.layer_in_group,
            group.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            place.attention,
            attended.reshape(num_tokens, config.num_heads, config.head_dim),
        )
        out = self._workspace.branch[:num_tokens]
        kernels.linear(attended, weights.o, out)
        return out

    def _mlp(self, index: int, layer: LayerWeights, x: Array) -> Array:
        out = self._workspace.branch[: x.shape[0]]
        if isinstance(layer.mlp, DenseWeights):
            self._dense(layer.mlp, x, out)
        else:
            self._mixture(index, layer.mlp, x, out)
        return out

    def _dense(self, weights: DenseWeights, x: Array, out: Array) -> None:
        kernels, size, num_tokens = self._kernels, weights.intermediate_size, x.shape[0]
        activated = self._workspace.activated[:num_tokens, :size]
        if self.config.gated_mlp:
            up = self._workspace.up[:num_tokens, : 2 * size]
            kernels.gated_mlp(x, weights.up, self.config.activation, weights.down, up, activated, out)
        else:
            kernels.linear(x, weights.up, activated)
            kernels.activation(activated, self.config.activation, activated)
            kernels.linear(activated, weights.down, out)

    def _mixture(self, index: int, weights: ExpertWeights, x: Array, out: Array) -> None:
        moe, work = self.config.moe, self._workspace.experts
        if moe is None or work is None:
            raise TypeError("a sparse layer in a model without experts")
        kernels, num_tokens = self._kernels, x.shape[0]
        ids, chosen = work.ids[index][:num_tokens], work.weights[:num_tokens]
        kernels.linear(x, weights.router, work.logits[:num_tokens])
        kernels.route_experts(work.logits[:num_tokens], moe.num_experts_per_token, moe.normalize, ids, chosen)
        up, activated, down = work.up[:num_tokens], work.activated[:num_tokens], work.down[:num_tokens]
        kernels.grouped_linear(x, weights.up, ids, up)
        kernels.gated_activation(up, self.config.activation, activated)
        kernels.grouped_linear(activated, weights.down, ids, down)
        kernels.combine_experts(down, chosen, out)
        if weights.shared is not None:
            self._shared_expert(work, weights.shared, weights.shared_router, x, out)

    def _shared_expert(
        self, work: _ExpertWorkspace, weights: DenseWeights, router: Array | None, x: Array, out: Array
    ) -> None:
        """out += the expert that every token passes through, times its gate if it has one."""
        shared = work.shared[: x.shape[0]]
        self._dense(weights, x, shared)
        if router is None:
            self._kernels.add(out, shared)
        else:
            gate = work.shared_gate[: x.shape[0]]
            self._kernels.linear(x, router, gate)
            self._kernels.add_gated(out, shared, gate)
