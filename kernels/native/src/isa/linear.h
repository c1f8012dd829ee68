// Products with packed weights: sixteen outputs per vector, a few rows at a time. Layouts: pack.h.
#pragma once

namespace octavo::OCTAVO_ISA {
namespace {

// ---- activations ----------------------------------------------------------------------------------------------

inline void quantize_group(const float* x, int64_t n, int8_t* codes, float* scale, float* sum, int32_t* isum) {
  const F a = load_n(x, n), b = load_n(x + kLanes, n - kLanes);
  const uint32_t nan = bits(is_nan(a)) | bits(is_nan(b));
  const float top = reduce_max(max(abs(a), abs(b)));
  const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
  const I qa = round(a * set1(inverse)), qb = round(b * set1(inverse));
  store_bytes(codes, qa);
  store_bytes(codes + kLanes, qb);
  const float total = reduce_add(to_float(qa) + to_float(qb));  // integers below 2^13: exact in any order
  *isum = static_cast<int32_t>(total);
  *scale = nan ? __builtin_nanf("") : top / 127.0f;
  *sum = *scale * total;
}

// Where row r keeps what belongs to group g.
inline int64_t group_at(int64_t row, int64_t g, int64_t groups) { return row / 16 * 16 * groups + g * 16 + row % 16; }

// Rows [begin, end), of which x is the first; the columns' share of the codes.
void quantize(const float* x, int64_t stride, Columns columns, const QuantizedRows& q, int64_t begin, int64_t end) {
  const int64_t groups = q.k_padded / kGroup, first = columns.first / kGroup;
  for (int64_t r = begin; r < end; ++r, x += stride)
    for (int64_t i = 0; i < columns.count; i += kGroup) {
      const int64_t g = first + i / kGroup, at = group_at(r, g, groups);
      quantize_group(x + i, columns.count - i, q.codes + r * q.k_padded + g * kGroup, q.scale + at, q.sum + at, q.isum + at);
    }
}

// ---- quantised weights ----------------------------------------------------------------------------------------

inline int64_t code_bytes(WeightKind kind) { return kind == WeightKind::q8 ? kGroup * kLanes : kGroup * kLanes / 2; }
inline int64_t scale_words(WeightKind kind) { return kind == WeightKind::q4_min ? 2 * kLanes : kLanes; }

inline int32_t load_word(const int8_t* p) {
  int32_t w;
  __builtin_memcpy(&w, p, 4);
  return w;
}

template <int R> struct QuantizedTile {
  F acc[R];
  I sum[R];

  template <WeightKind K> void dot(int r, I w, int32_t word) {
    if constexpr (K == WeightKind::q8)
      sum[r] = Dot::u8s8(sum[r], w, iset1(word));
    else
      sum[r] = Dot::u4s8(sum[r], w, iset1(word));
  }

  // One group of 32 inputs: exact integer sums. Weights enter unsigned; what the offset adds is taken off beforehand.
  template <WeightKind K> void integer_sums(const uint8_t* codes, const QuantizedRows& q, int64_t row, int64_t g) {
    constexpr int32_t kOffset = K == WeightKind::q8 ? 128 : K == WeightKind::q4 ? 8 : 0;
    const int32_t* isum = q.isum + group_at(row, g, q.k_padded / kGroup);
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) sum[r] = iset1(kOffset ? -kOffset * isum[r] : 0);
    const int8_t* x = q.codes + row * q.k_padded + g * kGroup;
    if constexpr (K == WeightKind::q8) {
      for (int j = 0; j < 8; ++j) {
        const I w = flip_sign_bytes(iload(codes + 64 * j));
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) dot<K>(r, w, load_word(x + r * q.k_padded + 4 * j));
      }
    } else {
      for (int j = 0; j < 4; ++j) {
        const I both = iload(codes + 64 * j), low = low_nibbles(both), high = high_nibbles(both);
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
          dot<K>(r, low, load_word(x + r * q.k_padded + 8 * j));
          dot<K>(r, high, load_word(x + r * q.k_padded + 8 * j + 4));
        }
      }
    }
  }

  // acc = fma(Σ, d · dx, acc), then with a minimum acc = fma(m, dx · Σx, acc)
  template <WeightKind K> void accumulate(F d, F m, const QuantizedRows& q, int64_t row, int64_t g) {
    const int64_t at = group_at(row, g, q.k_padded / kGroup);
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      acc[r] = fma(to_float(sum[r]), d * set1(q.scale[at + r]), acc[r]);
      if constexpr (K == WeightKind::q4_min) acc[r] = fma(m, set1(q.sum[at + r]), acc[r]);
    }
  }
};

inline float* output_at(const LinearArgs& a, int64_t row, int64_t block) {
  const int64_t out_row = a.out_rows ? a.out_rows[row] : row, column = a.part.n_offset + block * kLanes;
  return a.out + (out_row - a.first_row) * a.out_stride + column - a.first_column;
}

inline void store_output(const LinearArgs& a, int64_t row, int64_t block, F value) {
  const int64_t n = a.part.n - block * kLanes;
  if (a.bias) value = value + load_n(a.bias + a.part.n_offset + block * kLanes, n);
  store_n(output_at(a, row, block), n, value);
}

template <WeightKind K, int R> void quantized_rows(const LinearArgs& a, int64_t row, int64_t block) {
  const WeightPart& w = a.part;
  const int64_t groups = w.k_padded / kGroup, per_scale = w.groups_per_scale;
  const int64_t scale_groups = (groups + per_scale - 1) / per_scale;
  const uint8_t* codes = w.codes + block * groups * code_bytes(K);
  const uint16_t* scales = w.scales + block * scale_groups * scale_words(K);
  QuantizedTile<R> tile;
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) tile.acc[r] = zero();
  for (int64_t s = 0, g = 0; s < scale_groups; ++s, scales += scale_words(K)) {
    const F d = load_half(scales);
    const F m = K == WeightKind::q4_min ? load_half(scales + kLanes) : zero();
    const int64_t last = g + per_scale < groups ? g + per_scale : groups;
    for (; g < last; ++g, codes += code_bytes(K)) {
      tile.template integer_sums<K>(codes, a.q, row, g);
      tile.template accumulate<K>(d, m, a.q, row, g);
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) store_output(a, row + r, block, tile.acc[r]);
}

// ---- float weights --------------------------------------------------------------------------------------------

// Two running sums per output: even inputs and odd inputs, added at the end.
template <WeightKind K, int R> void float_rows(const LinearArgs& a, int64_t row, int64_t block) {
  const WeightPart& w = a.part;
  F even[R], odd[R];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
  const float* x = a.x + row * a.x_stride;
  const int64_t pairs = w.k / 2, element = K == WeightKind::f32 ? 4 : 2;
  const uint8_t* codes = w.codes + block * w.k_padded * kLanes * element;
  F we, wo;
  const auto load_pair = [&](int64_t p) {
    if constexpr (K == WeightKind::f32) {
      const auto* f = reinterpret_cast<const float*>(codes) + p * 2 * kLanes;
      we = load(f);
      wo = load(f + kLanes);
    } else {
      load_bf16_pairs(reinterpret_cast<const uint16_t*>(codes) + p * 2 * kLanes, we, wo);
    }
  };
  for (int64_t p = 0; p < pairs; ++p) {
    load_pair(p);
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      even[r] = fma(set1(x[r * a.x_stride + 2 * p]), we, even[r]);
      odd[r] = fma(set1(x[r * a.x_stride + 2 * p + 1]), wo, odd[r]);
    }
  }
  if (w.k % 2) {
    load_pair(pairs);
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) even[r] = fma(set1(x[r * a.x_stride + w.k - 1]), we, even[r]);
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) store_output(a, row + r, block, even[r] + odd[r]);
}

// ---- dispatch -------------------------------------------------------------------------------------------------

constexpr int kRowTile = 8;

template <WeightKind K, int R> inline void rows(const LinearArgs& a, int64_t row, int64_t block) {
  if constexpr (K == WeightKind::f32 || K == WeightKind::bf16)
    float_rows<K, R>(a, row, block);
  else
    quantized_rows<K, R>(a, row, block);
}

template <WeightKind K, int R> inline void some_rows(const LinearArgs& a, int64_t row, int64_t n, int64_t block) {
  if (n == R)
    rows<K, R>(a, row, block);
  else if constexpr (R > 1)
    some_rows<K, R - 1>(a, row, n, block);
}

template <WeightKind K>
void linear_blocks(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t block_begin, int64_t block_end) {
  for (int64_t block = block_begin; block < block_end; ++block)
    for (int64_t row = row_begin; row < row_end; row += kRowTile) {
      const int64_t n = row_end - row < kRowTile ? row_end - row : kRowTile;
      some_rows<K, kRowTile>(a, row, n, block);
    }
}

void linear(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t block_begin, int64_t block_end) {
  switch (a.part.kind) {
    case WeightKind::f32: return linear_blocks<WeightKind::f32>(a, row_begin, row_end, block_begin, block_end);
    case WeightKind::bf16: return linear_blocks<WeightKind::bf16>(a, row_begin, row_end, block_begin, block_end);
    case WeightKind::q8: return linear_blocks<WeightKind::q8>(a, row_begin, row_end, block_begin, block_end);
    case WeightKind::q4: return linear_blocks<WeightKind::q4>(a, row_begin, row_end, block_begin, block_end);
    case WeightKind::q4_min: return linear_blocks<WeightKind::q4_min>(a, row_begin, row_end, block_begin, block_end);
  }
}

int64_t linear_scratch(int64_t) { return 0; }

// ---- one row of the matrix, as an embedding -------------------------------------------------------------------

inline float half_value(uint16_t h) {
  float lanes[kLanes];
  uint16_t halves[kLanes] = {h};
  store(lanes, load_half(halves));
  return lanes[0];
}

inline int32_t code_at(const WeightPart& w, const uint8_t* codes, int64_t lane, int64_t i) {
  const int64_t g = i / kGroup, in_group = i % kGroup;
  const uint8_t* group = codes + g * code_bytes(w.kind);
  constexpr int kPlace[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // the inverse of kByteOrder
  const int64_t at = in_group / 8 * 8 + kPlace[in_group % 8];
  if (w.kind == WeightKind::q8) return static_cast<int8_t>(group[at / 4 * 64 + lane * 4 + at % 4]);
  const uint8_t both = group[at / 8 * 64 + lane * 4 + at % 4];
  const int32_t code = at % 8 < 4 ? both & 15 : both >> 4;
  return w.kind == WeightKind::q4 ? code - 8 : code;
}

inline float bf16_value(uint16_t h) {
  const uint32_t b = static_cast<uint32_t>(h) << 16;
  float x;
  __builtin_memcpy(&x, &b, 4);
  return x;
}

void embed(const WeightPart& w, int64_t row, float scale, bool accumulate, float* out) {
  const int64_t block = row / kLanes, lane = row % kLanes, groups = w.k_padded / kGroup;
  const auto put = [&](int64_t i, float value) {
    value = scale * value;
    out[i] = accumulate ? out[i] + value : value;
  };
  if (w.kind == WeightKind::f32) {
    const auto* f = reinterpret_cast<const float*>(w.codes) + block * w.k_padded * kLanes + lane;
    for (int64_t i = 0; i < w.k; ++i) put(i, f[i * kLanes]);
    return;
  }
  if (w.kind == WeightKind::bf16) {
    const auto* b = reinterpret_cast<const uint16_t*>(w.codes) + block * w.k_padded * kLanes + lane * 2;
    for (int64_t i = 0; i < w.k; ++i) put(i, bf16_value(b[i / 2 * 2 * kLanes + i % 2]));
    return;
  }
  const int64_t per_scale = w.groups_per_scale, scale_groups = (groups + per_scale - 1) / per_scale;
  const uint8_t* codes = w.codes + block * groups * code_bytes(w.kind);
  const uint16_t* scales = w.scales + block * scale_groups * scale_words(w.kind) + lane;
  for (int64_t g = 0; g < groups; ++g) {
    const uint16_t* s = scales + g / per_scale * scale_words(w.kind);
    const float d = half_value(s[0]), m = w.kind == WeightKind::q4_min ? half_value(s[kLanes]) : 0.0f;
    const int64_t last = (g + 1) * kGroup < w.k ? (g + 1) * kGroup : w.k;
    for (int64_t i = g * kGroup; i < last; ++i) {
      const float product = d * static_cast<float>(code_at(w, codes, lane, i));
      put(i, w.kind == WeightKind::q4_min ? product + m : product);
    }
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
