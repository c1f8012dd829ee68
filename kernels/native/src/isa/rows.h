// Operations on each row alone: norms, activations, rotation with the KV store.
#pragma once

namespace octavo::OCTAVO_ISA {
namespace {

inline float* row(const Rows& rows, int64_t inner, int64_t r) {
  return rows.data + r / inner * rows.outer_stride + r % inner * rows.inner_stride;
}

// Σ f(x[i]) over a row: sixteen running sums, then a fixed tree
template <typename Term> inline float sum_over(int64_t n, Term term) {
  F sum = zero();
  for (int64_t i = 0; i < n; i += kLanes) sum = term(i, sum);
  return reduce_add(sum);
}

inline void add_residual(const NormArgs& a, int64_t r) {
  const float* x = row(a.x, a.inner, r);
  float* residual = row(a.residual, a.inner, r);
  for (int64_t i = 0; i < a.width; i += kLanes)
    store_n(residual + i, a.width - i, load_n(residual + i, a.width - i) + load_n(x + i, a.width - i));
}

inline const float* norm_input(const NormArgs& a, int64_t r) {
  if (!a.residual.data) return row(a.x, a.inner, r);
  add_residual(a, r);
  return row(a.residual, a.inner, r);
}

void rms_norm(const NormArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const float* x = norm_input(a, r);
    float* out = row(a.out, a.inner, r);
    const float squares = sum_over(a.width, [&](int64_t i, F sum) {
      const F v = load_n(x + i, a.width - i);
      return fma(v, v, sum);
    });
    const F inverse = set1(1.0f / __builtin_sqrtf(squares / static_cast<float>(a.width) + a.eps));
    for (int64_t i = 0; i < a.width; i += kLanes) {
      const int64_t n = a.width - i;
      store_n(out + i, n, load_n(x + i, n) * inverse * load_n(a.weight + i, n));
    }
  }
}

void layer_norm(const NormArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const float* x = norm_input(a, r);
    float* out = row(a.out, a.inner, r);
    const float width = static_cast<float>(a.width);
    const float total = sum_over(a.width, [&](int64_t i, F sum) { return sum + load_n(x + i, a.width - i); });
    const F mean = set1(total / width);
    const float squares = sum_over(a.width, [&](int64_t i, F sum) {
      const int64_t n = a.width - i;
      const F d = load_n(x + i, n) - mean;
      return fma(d, n >= kLanes ? d : select(from_bits((1u << n) - 1), d, zero()), sum);
    });
    const F inverse = set1(1.0f / __builtin_sqrtf(squares / width + a.eps));
    for (int64_t i = 0; i < a.width; i += kLanes) {
      const int64_t n = a.width - i;
      F y = (load_n(x + i, n) - mean) * inverse * load_n(a.weight + i, n);
      if (a.bias) y = y + load_n(a.bias + i, n);
      store_n(out + i, n, y);
    }
  }
}

template <typename Map> inline void pointwise(const PointwiseArgs& a, int64_t begin, int64_t end, Map map) {
  for (int64_t r = begin; r < end; ++r) {
    const float* x = a.x + r * a.x_stride;
    float* out = a.out + r * a.out_stride;
    for (int64_t i = 0; i < a.width; i += kLanes) store_n(out + i, a.width - i, map(x + i, out + i, a.width - i));
  }
}

// Gate and up stand `apart` columns from each other.
template <Activation A> void gated(const PointwiseArgs& a, int64_t apart, int64_t begin, int64_t end) {
  pointwise(a, begin, end, [=](const float* x, const float*, int64_t n) {
    return activate<A>(load_n(x, n)) * load_n(x + apart, n);
  });
}

template <Activation A> void activated(const PointwiseArgs& a, int64_t begin, int64_t end) {
  pointwise(a, begin, end, [](const float* x, const float*, int64_t n) { return activate<A>(load_n(x, n)); });
}

void gated_strip(const PointwiseArgs& a, int64_t apart, int64_t begin, int64_t end) {
  switch (a.activation) {
    case Activation::silu: return gated<Activation::silu>(a, apart, begin, end);
    case Activation::gelu: return gated<Activation::gelu>(a, apart, begin, end);
    case Activation::gelu_tanh: return gated<Activation::gelu_tanh>(a, apart, begin, end);
    case Activation::relu: return gated<Activation::relu>(a, apart, begin, end);
  }
}

void gated_activation(const PointwiseArgs& a, int64_t begin, int64_t end) { gated_strip(a, a.width, begin, end); }

void activation(const PointwiseArgs& a, int64_t begin, int64_t end) {
  switch (a.activation) {
    case Activation::silu: return activated<Activation::silu>(a, begin, end);
    case Activation::gelu: return activated<Activation::gelu>(a, begin, end);
    case Activation::gelu_tanh: return activated<Activation::gelu_tanh>(a, begin, end);
    case Activation::relu: return activated<Activation::relu>(a, begin, end);
  }
}

void soft_cap(const PointwiseArgs& a, int64_t begin, int64_t end) {
  const F cap = set1(a.value);
  pointwise(a, begin, end, [&](const float* x, const float*, int64_t n) { return cap * tanh(load_n(x, n) / cap); });
}

void scale(const PointwiseArgs& a, int64_t begin, int64_t end) {
  pointwise(a, begin, end, [&](const float* x, const float*, int64_t n) { return load_n(x, n) * set1(a.value); });
}

void divide(const PointwiseArgs& a, int64_t begin, int64_t end) {
  pointwise(a, begin, end, [&](const float* x, const float*, int64_t n) { return load_n(x, n) / set1(a.value); });
}

void add(const PointwiseArgs& a, int64_t begin, int64_t end) {
  pointwise(a, begin, end, [](const float* x, const float* out, int64_t n) { return load_n(out, n) + load_n(x, n); });
}

void add_gated(const PointwiseArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const F gate = set1(1.0f) / (set1(1.0f) + exp(set1(-a.gate[r])));
    const float* x = a.x + r * a.x_stride;
    float* out = a.out + r * a.out_stride;
    for (int64_t i = 0; i < a.width; i += kLanes) {
      const int64_t n = a.width - i;
      store_n(out + i, n, load_n(out + i, n) + gate * load_n(x + i, n));
    }
  }
}

// float bits rounded to bf16 (to nearest even), in the low 16 bits of each lane; NaN becomes a quiet NaN
inline I bf16_bits(F x) {
  const I b = as_int(x);
  const I rounded = shr<16>(b + iset1(0x7FFF) + (shr<16>(b) & iset1(1)));
  const uint32_t nan = bits(is_nan(x));
  if (nan == 0) return rounded;
  return as_int(select(from_bits(nan), as_float(iset1(0x7FC0)), as_float(rounded)));
}

inline uint16_t bf16_of(float x) {
  uint32_t b;
  __builtin_memcpy(&b, &x, 4);
  if (x != x) return 0x7FC0;
  return static_cast<uint16_t>((b + 0x7FFFu + (b >> 16 & 1u)) >> 16);
}

// One head's rotation in place: products and sums rounded one by one, as the reference has it.
inline void rotate(float* x, const float* cos, const float* sin, int64_t half, bool interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i;
    const F a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
    store_n(x + i, n, a * c - b * s);
    store_n(x + half + i, n, b * c + a * s);
  }
}

inline float largest(const float* x, int64_t n) {
  F m = zero();
  for (int64_t i = 0; i < n; i += kLanes) m = max(m, abs(load_n(x + i, n - i)));
  return reduce_max(m);
}

// Element i of a vector goes to `at(i)`; 8-bit elements share one scale, which is returned.
template <typename At> inline void store_elements(const float* x, int64_t n, ElementKind kind, At at, float* scale) {
  if (kind == ElementKind::f32) {
    auto* base = static_cast<float*>(at.base);
    for (int64_t i = 0; i < n; ++i) base[at(i)] = x[i];
  } else if (kind == ElementKind::bf16) {
    auto* base = static_cast<uint16_t*>(at.base);
    for (int64_t i = 0; i < n; ++i) base[at(i)] = bf16_of(x[i]);
  } else {
    auto* base = static_cast<int8_t*>(at.base);
    const float top = largest(x, n);
    const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
    *scale = top / 127.0f;
    int32_t codes[kLanes];
    for (int64_t i = 0; i < n; i += kLanes) {
      istore(codes, round(load_n(x + i, n - i) * set1(inverse)));
      for (int64_t j = 0; j < kLanes && i + j < n; ++j) base[at(i + j)] = static_cast<int8_t>(codes[j]);
    }
  }
}

// Inside a block, pairs of elements that a dot product meets together stand side by side; see docs/native-kernels.md.
struct KeyAt {  // [d/2][lanes][2], float32: [d][lanes]
  void* base;
  int64_t lanes, offset;
  bool paired;
  int64_t operator()(int64_t i) const {
    return paired ? (i / 2 * lanes + offset) * 2 + i % 2 : i * lanes + offset;
  }
};
struct ValueAt {  // [lanes/2][dv][2], float32: [lanes][dv]
  void* base;
  int64_t width, offset;
  bool paired;
  int64_t operator()(int64_t i) const {
    return paired ? (offset / 2 * width + i) * 2 + offset % 2 : offset * width + i;
  }
};

inline void store_kv(const RopeArgs& a, int64_t t) {
  const KvLayout& kv = a.kv;
  const int64_t slot = a.slots[t];
  if (slot < 0) return;
  const int64_t offset = slot % kv.block_size;
  uint8_t* block = a.cache + slot / kv.block_size * kv.block_bytes;
  const bool paired = kv.kind != ElementKind::f32;
  for (int64_t h = 0; h < kv.kv_heads; ++h) {
    uint8_t* head = block + h * kv.head_bytes;
    auto* k_scale = reinterpret_cast<float*>(head + kv.k_scale_offset) + offset;
    auto* v_scale = reinterpret_cast<float*>(head + kv.v_scale_offset) + offset;
    const float* k = a.k.data + t * a.k.outer_stride + h * a.k.inner_stride;
    const float* v = a.v.data + t * a.v.outer_stride + h * a.v.inner_stride;
    store_elements(k, kv.d, kv.kind, KeyAt{head, kv.lanes, offset, paired}, k_scale);
    store_elements(v, kv.dv, kv.kind, ValueAt{head + kv.v_offset, kv.dv_padded, offset, paired}, v_scale);
  }
}

void rope_and_store(const RopeArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    if (a.cos_sin) {
      const float* cos = a.cos_sin + a.positions[t] * a.cos_sin_stride;
      const float* sin = cos + a.rotary / 2;
      for (int64_t h = 0; h < a.q_heads; ++h)
        rotate(a.q.data + t * a.q.outer_stride + h * a.q.inner_stride, cos, sin, a.rotary / 2, a.interleaved);
      for (int64_t h = 0; h < a.kv.kv_heads; ++h)
        rotate(a.k.data + t * a.k.outer_stride + h * a.k.inner_stride, cos, sin, a.rotary / 2, a.interleaved);
    }
    store_kv(a, t);
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
