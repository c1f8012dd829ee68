// The model's operations as methods of a session: arguments are checked here, once per recorded plan.

#include "arrays.h"

namespace octavo {
namespace {

using Weight = std::shared_ptr<PackedWeight>;

// ---- norms and pointwise --------------------------------------------------------------------------------------

Rows rows_of(float* data, const View<float>& v) {
  return v.shape.size() == 3 ? Rows{data, v.stride[0], v.stride[1]} : Rows{data, v.stride[0], 0};
}

void norm(Session& s, const Out& x, const In& weight, const std::optional<In>& bias, float eps, const Out& out,
          const std::optional<Out>& residual, bool layer_norm) {
  const auto vx = view<float>(x, "x", 0), vo = view<float>(out, "out", 0);
  const auto vw = dense<const float>(weight, "weight", 1);
  expect(vx.shape.size() == 2 || vx.shape.size() == 3, "x", "needs 2 or 3 axes");
  expect(vx.shape == vo.shape, "out", "shape differs from x");
  expect(vw.last() == vx.last(), "weight", "wrong width");
  NormArgs a{};
  a.x = rows_of(vx.data, vx);
  a.out = rows_of(vo.data, vo);
  a.inner = vx.shape.size() == 3 ? vx.shape[1] : 1;
  a.width = vx.last();
  a.weight = vw.data;
  a.eps = eps;
  if (bias) a.bias = dense<const float>(*bias, "bias", 1).data;
  if (residual) {
    const auto vr = view<float>(*residual, "residual", 0);
    expect(vr.shape == vx.shape, "residual", "shape differs from x");
    a.residual = rows_of(vr.data, vr);
  }
  submit(s, norm_op(s.table, a, vx.rows() * a.inner, layer_norm), x, weight, out, bias, residual);
}

template <typename Array>
void pointwise(Session& s, RowKernel kernel, const Array& x, const Out& out, int64_t width, float value,
               int activation) {
  const auto vx = view<const float>(x, "x", 2);
  const auto vo = view<float>(out, "out", 2);
  expect(vx.rows() == vo.rows() && vo.last() == width, "out", "wrong shape");
  expect(activation >= 0 && activation <= 3, "activation", "unknown");
  const PointwiseArgs a{vx.data, vo.data, vx.stride[0], vo.stride[0], width, value, static_cast<Activation>(activation),
                        nullptr};
  submit(s, pointwise_op(kernel, a, vx.rows()), x, out);
}

// [T, 2·I] → [T, I], or both with an axis of experts between, contiguous.
template <typename Array> void gated_activation(Session& s, const Array& x, int activation, const Out& out) {
  expect(x.ndim() == out.ndim() && (x.ndim() == 2 || x.ndim() == 3), "gate_up", "needs 2 or 3 axes");
  const bool experts = x.ndim() == 3;
  const auto vx = experts ? dense<const float>(x, "gate_up", 3) : view<const float>(x, "gate_up", 2);
  const auto vo = experts ? dense<float>(out, "out", 3) : view<float>(out, "out", 2);
  expect(vx.last() == 2 * vo.last(), "out", "wrong width");
  expect(vx.rows() == vo.rows() && (!experts || vx.shape[1] == vo.shape[1]), "out", "wrong shape");
  expect(activation >= 0 && activation <= 3, "activation", "unknown");
  const int64_t rows = experts ? vx.shape[0] * vx.shape[1] : vx.shape[0];
  const PointwiseArgs a{vx.data, vo.data, experts ? vx.last() : vx.stride[0], experts ? vo.last() : vo.stride[0],
                        vo.last(), 0, static_cast<Activation>(activation), nullptr};
  submit(s, pointwise_op(s.table.gated_activation, a, rows), x, out);
}

void add_gated(Session& s, const Out& x, const In& y, const In& gate) {
  const auto vx = view<float>(x, "x", 2);
  const auto vy = view<const float>(y, "y", 2);
  const auto vg = dense<const float>(gate, "gate", 2);
  expect(vy.shape == vx.shape, "y", "shape differs from x");
  expect(vg.rows() == vx.rows() && vg.last() == 1, "gate", "wrong shape");
  const PointwiseArgs a{vy.data, vx.data, vy.stride[0], vx.stride[0], vx.last(), 0, Activation::silu, vg.data};
  submit(s, pointwise_op(s.table.add_gated, a, vx.rows()), x, y, gate);
}

void gather_rows(Session& s, const In& x, const In& rows, const Out& out) {
  const auto vx = view<const float>(x, "x", 2);
  const auto vr = dense<const int32_t>(rows, "rows", 1);
  const auto vo = view<float>(out, "out", 2);
  expect(vo.rows() == vr.rows() && vo.last() == vx.last(), "out", "wrong shape");
  submit(s, gather_op(vx.data, vx.stride[0], vr.data, vo.data, vo.stride[0], vr.rows(), vx.last()), x, rows, out);
}

// ---- weights --------------------------------------------------------------------------------------------------

void embedding(Session& s, const In& ids, const Weight& weight, const Out& out, float scale, bool accumulate) {
  const auto vi = dense<const int32_t>(ids, "token_ids", 1);
  const auto vo = view<float>(out, "out", 2);
  expect(vo.rows() == vi.rows() && vo.last() == weight->k, "out", "wrong shape");
  submit(s, embedding_op(s.table, *weight, vi.data, scale, accumulate, vo.data, vo.stride[0], vi.rows()), ids, weight,
         out);
}

template <typename Array> void linear(Session& s, const Array& x, const Weight& weight, const Out& out) {
  const auto vx = view<const float>(x, "x", 2);
  const auto vo = view<float>(out, "out", 2);
  expect(vx.last() == weight->k, "x", "wrong width");
  expect(vo.rows() == vx.rows() && vo.last() == weight->n, "out", "wrong shape");
  submit(s, linear_op(s.table, *weight, matrix(vx), matrix(vo)), x, weight, out);
}

void gated_mlp(Session& s, const In& x, const Weight& up, int activation, const Weight& down, const Out& gate_up,
               const Out& activated, const Out& out) {
  const auto vx = view<const float>(x, "x", 2);
  const auto va = view<float>(activated, "activated", 2), vo = view<float>(out, "out", 2);
  expect(vx.last() == up->k && up->n == 2 * down->k, "x", "wrong width");
  expect(va.rows() == vx.rows() && va.last() == down->k, "activated", "wrong shape");
  expect(vo.rows() == vx.rows() && vo.last() == down->n, "out", "wrong shape");
  expect(activation >= 0 && activation <= 3, "activation", "unknown");
  if (!gated_mlp_fits(*up)) {
    linear(s, x, up, gate_up);
    gated_activation(s, gate_up, activation, activated);
    return linear(s, activated, down, out);
  }
  submit(s, gated_mlp_op(s.table, *up, static_cast<Activation>(activation), *down, matrix(vx), matrix(va), matrix(vo)),
         x, up, down, activated, out);
}

void grouped_linear(Session& s, const In& x, const nb::list& experts, const In& ids, const Out& out) {
  const auto vx = dense<const float>(x, "x", 0);
  const auto vi = dense<const int32_t>(ids, "expert_ids", 2);
  const auto vo = dense<float>(out, "out", 3);
  std::vector<const PackedWeight*> weights;
  auto owners = std::make_shared<std::vector<Weight>>();
  for (const nb::handle expert : experts) {
    owners->push_back(nb::cast<Weight>(expert));
    weights.push_back(owners->back().get());
    expect(weights.back()->n == weights[0]->n && weights.back()->k == weights[0]->k, "weight", "experts differ");
  }
  expect(!weights.empty(), "weight", "no experts");
  const bool shared = vx.shape.size() == 2;
  expect(shared || vx.shape.size() == 3, "x", "needs 2 or 3 axes");
  expect(vx.rows() == vi.rows() && vx.last() == weights[0]->k, "x", "wrong shape");
  expect(shared || vx.shape[1] == vi.last(), "x", "wrong number of choices");
  expect(vo.rows() == vi.rows() && vo.shape[1] == vi.last() && vo.last() == weights[0]->n, "out", "wrong shape");
  const ExpertRows rows{vi.data, vi.rows(), vi.last(), shared};
  const int64_t count = vi.rows() * vi.last();
  const Matrix mx{const_cast<float*>(vx.data), shared ? vi.rows() : count, vx.last()}, mo{vo.data, count, vo.last()};
  submit(s, grouped_linear_op(s.table, std::move(weights), rows, mx, mo), x, owners, ids, out);
}

void route_experts(Session& s, const In& logits, int64_t top_k, bool normalize, const Out& ids, const Out& weights) {
  const auto vl = view<const float>(logits, "logits", 2);
  const auto vi = dense<int32_t>(ids, "expert_ids", 2);
  const auto vw = dense<float>(weights, "expert_weights", 2);
  expect(vi.rows() == vl.rows() && vi.last() == top_k && top_k <= vl.last(), "expert_ids", "wrong shape");
  expect(vw.shape == vi.shape, "expert_weights", "wrong shape");
  submit(s, route_experts_op(matrix(vl), vl.last(), top_k, normalize, vi.data, vw.data), logits, ids, weights);
}

void combine_experts(Session& s, const In& y, const In& weights, const Out& out) {
  const auto vy = dense<const float>(y, "y", 3);
  const auto vw = dense<const float>(weights, "expert_weights", 2);
  const auto vo = view<float>(out, "out", 2);
  expect(vw.rows() == vy.rows() && vw.last() == vy.shape[1], "expert_weights", "wrong shape");
  expect(vo.rows() == vy.rows() && vo.last() == vy.last(), "out", "wrong shape");
  submit(s, combine_experts_op(vy.data, vw.data, vy.shape[1], vy.last(), matrix(vo)), y, weights, out);
}

// ---- KV cache -------------------------------------------------------------------------------------------------

// The Python side's description of a cache: blocks uint8 [num_blocks, block_bytes].
struct Cache {
  uint8_t* data;
  int64_t blocks;
  KvLayout layout;
};

KvLayout make_layout(int kind, int layers, int block_size, int kv_heads, int d, int dv) {
  expect(kind >= 0 && kind <= 2, "kv_cache", "unknown element kind");
  expect(block_size >= 1 && block_size <= kSplitKeys, "kv_cache", "block_size must lie in 1 to 256");
  expect(d >= 1 && d <= kMaxValueDim && dv >= 1 && dv <= kMaxValueDim, "kv_cache", "head sizes above 512");
  KvLayout l{};
  l.kind = static_cast<ElementKind>(kind);
  const int64_t element = l.kind == ElementKind::f32 ? 4 : l.kind == ElementKind::bf16 ? 2 : 1;
  l.block_size = block_size;
  l.lanes = static_cast<int32_t>(round_up(block_size, kLanes));
  l.kv_heads = kv_heads;
  l.d = d;
  l.d_padded = static_cast<int32_t>(round_up(d, kGroup));
  l.dv = dv;
  l.dv_padded = static_cast<int32_t>(round_up(dv, kLanes));
  l.v_offset = element * l.d_padded * l.lanes;
  l.k_scale_offset = l.v_offset + element * l.dv_padded * l.lanes;
  l.v_scale_offset = l.k_scale_offset + (l.kind == ElementKind::i8 ? 4 * l.lanes : 0);
  l.head_bytes = l.v_scale_offset + (l.kind == ElementKind::i8 ? 4 * l.lanes : 0);
  l.layer_bytes = l.head_bytes * kv_heads;
  l.block_bytes = l.layer_bytes * layers;
  return l;
}

uint8_t* layer_of(const Out& cache, const KvLayout& layout, int layer) {
  const auto v = dense<uint8_t>(cache, "kv_cache", 2);
  expect(v.last() == layout.block_bytes, "kv_cache", "wrong layout");
  expect(layer >= 0 && (layer + 1) * layout.layer_bytes <= layout.block_bytes, "layer", "out of range");
  return v.data + layer * layout.layer_bytes;
}

void rope_and_store(Session& s, const Out& q, const Out& k, const In& v, const In& positions,
                    const std::optional<In>& cos_sin, int rotary, bool interleaved, const Out& cache,
                    const KvLayout& layout, int layer, const In& slots) {
  const auto vq = view<float>(q, "q", 3), vk = view<float>(k, "k", 3);
  const auto vv = view<const float>(v, "v", 3);
  const auto vp = dense<const int32_t>(positions, "positions", 1);
  const auto vs = dense<const int64_t>(slots, "slot_mapping", 1);
  expect(vq.last() == layout.d && vk.last() == layout.d && vv.last() == layout.dv, "k", "wrong head size");
  expect(vk.shape[1] == layout.kv_heads && vv.shape[1] == layout.kv_heads, "k", "wrong number of heads");
  expect(vk.rows() == vq.rows() && vv.rows() == vq.rows() && vp.rows() == vq.rows() && vs.rows() == vq.rows(), "q",
         "different numbers of tokens");
  RopeArgs a{};
  a.q = head_rows(vq.data, vq.stride);
  a.k = head_rows(vk.data, vk.stride);
  a.v = head_rows(const_cast<float*>(vv.data), vv.stride);
  a.q_heads = vq.shape[1];
  a.positions = vp.data;
  if (cos_sin) {
    const auto vc = view<const float>(*cos_sin, "cos_sin", 2);
    expect(vc.last() == rotary && rotary % 2 == 0 && rotary <= layout.d, "cos_sin", "wrong width");
    a.cos_sin = vc.data;
    a.cos_sin_stride = vc.stride[0];
  }
  a.rotary = rotary;
  a.interleaved = interleaved;
  a.kv = layout;
  a.cache = layer_of(cache, layout, layer);
  a.slots = vs.data;
  submit(s, rope_op(s.table, a, vq.rows()), q, k, v, positions, cos_sin, cache, slots);
}

void paged_attention(Session& s, AttentionWork& work, const In& q, const Out& cache, const KvLayout& layout, int layer,
                     const In& tables, const In& query_start_loc, const In& seq_lens, float scale, int window,
                     float soft_cap, const Out& out) {
  const auto vq = view<const float>(q, "q", 3);
  const auto vo = view<float>(out, "out", 3);
  const auto vt = view<const int32_t>(tables, "block_tables", 2);
  const auto vs = dense<const int32_t>(query_start_loc, "query_start_loc", 1);
  const auto vl = dense<const int32_t>(seq_lens, "seq_lens", 1);
  expect(vq.last() == layout.d && vq.shape[1] % layout.kv_heads == 0, "q", "wrong heads");
  expect(vo.rows() == vq.rows() && vo.shape[1] == vq.shape[1] && vo.last() == layout.dv, "out", "wrong shape");
  expect(vs.rows() == vl.rows() + 1 && vt.rows() == vl.rows(), "seq_lens", "different numbers of sequences");
  AttentionArgs a{};
  a.q = vq.data;
  a.q_token = vq.stride[0];
  a.q_head = vq.stride[1];
  a.out = vo.data;
  a.out_token = vo.stride[0];
  a.out_head = vo.stride[1];
  a.kv = layout;
  a.cache = layer_of(cache, layout, layer);
  a.tables = vt.data;
  a.table_stride = vt.stride[0];
  a.group = static_cast<int32_t>(vq.shape[1] / layout.kv_heads);
  expect(a.group <= kAttentionRows, "q", "more than 128 query heads per KV head");
  a.scale = scale;
  a.window = window;
  a.soft_cap = soft_cap;
  const AttentionBatch batch{vs.data, vl.data, vl.rows(), vq.rows()};
  submit(s, attention_op(s.table, work, a, batch), q, cache, tables, query_start_loc, seq_lens, out);
}

void copy_blocks(Session& s, const Out& cache, const In& sources, const In& targets) {
  const auto vc = dense<uint8_t>(cache, "kv_cache", 2);
  const auto vs = dense<const int32_t>(sources, "sources", 1), vt = dense<const int32_t>(targets, "targets", 1);
  expect(vs.rows() == vt.rows(), "targets", "different numbers of blocks");
  for (int64_t i = 0; i < vs.rows(); ++i)
    expect(vs.data[i] >= 0 && vs.data[i] < vc.rows() && vt.data[i] >= 0 && vt.data[i] < vc.rows(), "targets",
           "a block that does not exist");
  submit(s, copy_blocks_op(vc.data, vc.last(), vs.data, vt.data, vs.rows()), cache);
}

}  // namespace

void bind_model(nb::module_& module, nb::class_<Session>& session) {
  nb::class_<KvLayout>(module, "KvLayout")
      .def_ro("block_bytes", &KvLayout::block_bytes)
      .def_ro("block_size", &KvLayout::block_size);
  module.def("kv_layout", &make_layout, nb::arg("kind"), nb::arg("layers"), nb::arg("block_size"),
             nb::arg("kv_heads"), nb::arg("d"), nb::arg("dv"));
  nb::class_<AttentionWork>(module, "AttentionWork").def(nb::init<>());

  session
      .def("rms_norm",
           [](Session& s, const Out& x, const In& weight, float eps, const Out& out, const std::optional<Out>& residual) {
             norm(s, x, weight, std::nullopt, eps, out, residual, false);
           }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
      .def("layer_norm",
           [](Session& s, const Out& x, const In& weight, const std::optional<In>& bias, float eps, const Out& out,
              const std::optional<Out>& residual) { norm(s, x, weight, bias, eps, out, residual, true); },
           nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none())
      .def("gated_activation", &gated_activation<In>)
      .def("add_gated", &add_gated)
      .def("activation",
           [](Session& s, const In& x, int activation, const Out& out) {
             pointwise(s, s.table.activation, x, out, view<const float>(x, "x", 2).last(), 0, activation);
           })
      .def("soft_cap",
           [](Session& s, const Out& x, float cap) {
             pointwise(s, s.table.soft_cap, x, x, view<float>(x, "x", 2).last(), cap, 0);
           })
      .def("scale",
           [](Session& s, const Out& x, float factor) {
             pointwise(s, s.table.scale, x, x, view<float>(x, "x", 2).last(), factor, 0);
           })
      .def("add",
           [](Session& s, const Out& x, const In& y) {
             pointwise(s, s.table.add, y, x, view<float>(x, "x", 2).last(), 0, 0);
           })
      .def("gather_rows", &gather_rows)
      .def("embedding", &embedding)
      .def("linear", &linear<In>)
      .def("gated_mlp", &gated_mlp)
      .def("grouped_linear", &grouped_linear)
      .def("route_experts", &route_experts)
      .def("combine_experts", &combine_experts)
      .def("rope_and_store", &rope_and_store, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
      .def("paged_attention", &paged_attention)
      .def("copy_blocks", &copy_blocks);
}

}  // namespace octavo
