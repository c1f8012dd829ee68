// Paged attention over one tile: partition after partition of kSplitKeys keys, each with its own maximum and sums,
// merged in order. A row's arithmetic does not depend on the rows beside it.
#pragma once

namespace octavo::OCTAVO_ISA {
namespace {

struct AttentionState {    // of one tile, in the thread's scratch
  float scores[kAttentionRows][kSplitKeys];
  float row_max[kAttentionRows];
  float row_sum[kAttentionRows];
};

inline int64_t partial_width(const KvLayout& kv) { return kv.dv_padded + 2; }

// acc, max and sum of `b` folded into `a`
inline void merge(float* a, const float* b, int64_t width) {
  const float old_max = a[width], new_max = old_max > b[width] ? old_max : b[width];
  const F keep = exp(set1(old_max - new_max)), take = exp(set1(b[width] - new_max));
  for (int64_t i = 0; i < width; i += kLanes) store(a + i, fma(load(b + i), take, load(a + i) * keep));
  float lane[kLanes];
  store(lane, fma(set1(b[width + 1]), take, set1(a[width + 1]) * keep));
  a[width] = new_max;
  a[width + 1] = lane[0];
}

inline void finish(const float* state, int64_t dv, int64_t width, float* out) {
  const F inverse = set1(state[width + 1] > 0.0f ? 1.0f / state[width + 1] : 0.0f);
  for (int64_t i = 0; i < dv; i += kLanes) store_n(out + i, dv - i, load(state + i) * inverse);
}

void merge_partials(const float* parts, int64_t count, int64_t part_stride, int32_t dv, int32_t dv_padded, float* out) {
  float state[kMaxValueDim + 2];
  for (int64_t i = 0; i < dv_padded; ++i) state[i] = 0.0f;
  state[dv_padded] = kHidden;
  state[dv_padded + 1] = 0.0f;
  for (int64_t p = 0; p < count; ++p) merge(state, parts + p * part_stride, dv_padded);
  finish(state, dv, dv_padded, out);
}

template <ElementKind E> inline void load_pair(const uint8_t* base, int64_t pair, int64_t width, int64_t at, F& even, F& odd) {
  if constexpr (E == ElementKind::f32) {
    const auto* p = reinterpret_cast<const float*>(base) + pair * 2 * width + at;
    even = load(p);
    odd = load(p + width);
  } else if constexpr (E == ElementKind::bf16) {
    load_bf16_pairs(reinterpret_cast<const uint16_t*>(base) + (pair * width + at) * 2, even, odd);
  } else {
    load_i8_pairs(reinterpret_cast<const int8_t*>(base) + (pair * width + at) * 2, even, odd);
  }
}

struct TileView {
  const AttentionArgs& a;
  const AttentionTile& t;
  int32_t rows;

  const float* query(int32_t row) const {
    const int64_t head = static_cast<int64_t>(t.kv_head) * a.group + row % a.group;
    return a.q + (t.first_token + row / a.group) * a.q_token + head * a.q_head;
  }
  float* output(int32_t row) const {
    const int64_t head = static_cast<int64_t>(t.kv_head) * a.group + row % a.group;
    return a.out + (t.first_token + row / a.group) * a.out_token + head * a.out_head;
  }
  int32_t position(int32_t row) const { return t.first_position + row / a.group; }
  int32_t end_block() const { return (t.last_key + a.kv.block_size - 1) / a.kv.block_size; }
  const uint8_t* block(int32_t index) const {
    return a.cache + static_cast<int64_t>(t.table[index]) * a.kv.block_bytes + t.kv_head * a.kv.head_bytes;
  }
};

// Scores of R rows against 16 keys of one block.
template <ElementKind E, int R>
inline void score_lanes(const TileView& v, const uint8_t* head, int32_t row, int32_t lane, int32_t first_key,
                        AttentionState& s, int32_t at) {
  const KvLayout& kv = v.a.kv;
  F even[R], odd[R];
  const float* q[R];
  for (int r = 0; r < R; ++r) {
    even[r] = odd[r] = zero();
    q[r] = v.query(row + r);
  }
  const int32_t pairs = kv.d / 2;
  F ke, ko;
  for (int32_t p = 0; p < pairs; ++p) {
    load_pair<E>(head, p, kv.lanes, lane, ke, ko);
    for (int r = 0; r < R; ++r) {
      even[r] = fma(set1(q[r][2 * p]), ke, even[r]);
      odd[r] = fma(set1(q[r][2 * p + 1]), ko, odd[r]);
    }
  }
  if (kv.d % 2) {
    load_pair<E>(head, pairs, kv.lanes, lane, ke, ko);
    for (int r = 0; r < R; ++r) even[r] = fma(set1(q[r][kv.d - 1]), ke, even[r]);
  }
  for (int r = 0; r < R; ++r) {
    F score = even[r] + odd[r];
    if constexpr (E == ElementKind::i8)
      score = score * load(reinterpret_cast<const float*>(head + kv.k_scale_offset) + lane);
    score = score * set1(v.a.scale);
    if (v.a.soft_cap > 0.0f) score = set1(v.a.soft_cap) * tanh(score / set1(v.a.soft_cap));
    // visible: position − window < key <= position, and inside the block
    const int32_t position = v.position(row + r), last = position - first_key;
    const int32_t low = v.a.window ? position - v.a.window + 1 - first_key : 0;
    const int32_t in_block = kv.block_size - lane - 1, high = last < in_block ? last : in_block;
    uint32_t mask = high < 0 ? 0 : high >= 15 ? 0xFFFFu : (2u << high) - 1;
    if (low > 0) mask &= low > 15 ? 0u : ~((1u << low) - 1);
    store(&s.scores[row + r][at], select(from_bits(mask), score, set1(kHidden)));
  }
}

// The scores of one row become weights; returns nothing but the row's maximum and sum.
inline void weigh(AttentionState& s, int32_t row, int32_t width) {
  float* x = s.scores[row];
  F top = set1(kHidden);
  for (int32_t i = 0; i < width; i += kLanes) top = max(top, load(x + i));
  const float m = reduce_max(top);
  F sum = zero();
  for (int32_t i = 0; i < width; i += kLanes) {
    const F score = load(x + i);
    const F p = select(at_least(set1(kHidden), score), zero(), exp(score - set1(m)));
    sum = sum + p;
    store(x + i, p);
  }
  s.row_max[row] = m;
  s.row_sum[row] = reduce_add(sum);
}

// acc[16 dims] of R rows over the partition's blocks, keys in order, even and odd apart.
template <ElementKind E, int R>
inline void weighted_values(const TileView& v, const AttentionState& s, int32_t row, int32_t dim, int32_t block,
                            int32_t end_block, int32_t last_key, float (*out)[kMaxValueDim + 2]) {
  const KvLayout& kv = v.a.kv;
  F even[R], odd[R], ve, vo;
  for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
  for (int32_t at = 0; block < end_block; ++block, at += kv.lanes) {
    const uint8_t* values = v.block(block) + kv.v_offset;
    int32_t keys = last_key - block * kv.block_size;  // past them lies what the block's last owner left
    if (keys > kv.block_size) keys = kv.block_size;
    for (int32_t p = 0; p < keys / 2; ++p) {
      load_pair<E>(values, p, kv.dv_padded, dim, ve, vo);
      for (int r = 0; r < R; ++r) {
        even[r] = fma(set1(s.scores[row + r][at + 2 * p]), ve, even[r]);
        odd[r] = fma(set1(s.scores[row + r][at + 2 * p + 1]), vo, odd[r]);
      }
    }
    if (keys % 2) {
      load_pair<E>(values, keys / 2, kv.dv_padded, dim, ve, vo);
      for (int r = 0; r < R; ++r) even[r] = fma(set1(s.scores[row + r][at + keys - 1]), ve, even[r]);
    }
  }
  for (int r = 0; r < R; ++r) store(out[r] + dim, even[r] + odd[r]);
}

template <ElementKind E, int R>
inline void row_block_scores(const TileView& v, int32_t row, int32_t block, int32_t end_block, AttentionState& s) {
  const KvLayout& kv = v.a.kv;
  for (int32_t at = 0; block < end_block; ++block)
    for (int32_t lane = 0; lane < kv.lanes; lane += kLanes, at += kLanes)
      score_lanes<E, R>(v, v.block(block), row, lane, block * kv.block_size + lane, s, at);
}

template <ElementKind E> inline void scale_weights(const TileView& v, int32_t block, int32_t end_block, AttentionState& s) {
  if constexpr (E != ElementKind::i8) return;
  const KvLayout& kv = v.a.kv;
  for (int32_t at = 0; block < end_block; ++block, at += kv.lanes) {
    const auto* scale = reinterpret_cast<const float*>(v.block(block) + kv.v_scale_offset);
    for (int32_t row = 0; row < v.rows; ++row)
      for (int32_t lane = 0; lane < kv.lanes; lane += kLanes) {
        float* x = &s.scores[row][at + lane];
        const F p = load(x);
        store(x, select(at_least(zero(), p), zero(), p * load(scale + lane)));  // 0: a slot perhaps never written
      }
  }
}

template <ElementKind E, int R>
inline void row_block_values(const TileView& v, int32_t row, int32_t block, int32_t end_block, const AttentionState& s,
                             float* states) {
  const KvLayout& kv = v.a.kv;
  float fresh[R][kMaxValueDim + 2];
  for (int32_t dim = 0; dim < kv.dv_padded; dim += kLanes)
    weighted_values<E, R>(v, s, row, dim, block, end_block, v.t.last_key, fresh);
  for (int r = 0; r < R; ++r) {
    fresh[r][kv.dv_padded] = s.row_max[row + r];
    fresh[r][kv.dv_padded + 1] = s.row_sum[row + r];
    merge(states + (row + r) * partial_width(kv), fresh[r], kv.dv_padded);
  }
}

template <ElementKind E> void partition(const TileView& v, int32_t block, int32_t end_block, AttentionState& s, float* states) {
  const int32_t width = (end_block - block) * v.a.kv.lanes;
  constexpr int R = 4;
  int32_t row = 0;
  for (; row + R <= v.rows; row += R) row_block_scores<E, R>(v, row, block, end_block, s);
  for (; row < v.rows; ++row) row_block_scores<E, 1>(v, row, block, end_block, s);
  for (row = 0; row < v.rows; ++row) weigh(s, row, width);
  scale_weights<E>(v, block, end_block, s);
  for (row = 0; row + R <= v.rows; row += R) row_block_values<E, R>(v, row, block, end_block, s, states);
  for (; row < v.rows; ++row) row_block_values<E, 1>(v, row, block, end_block, s, states);
}

// Blocks of one partition: the most that fill kSplitKeys lanes, at least one.
inline int32_t blocks_per_partition(const KvLayout& kv) { return kSplitKeys / kv.lanes; }

template <ElementKind E> void attend_kind(const TileView& v, uint8_t* scratch) {
  const KvLayout& kv = v.a.kv;
  auto& s = *reinterpret_cast<AttentionState*>(scratch);
  const int64_t width = partial_width(kv);
  float* states = v.t.partial ? v.t.partial : reinterpret_cast<float*>(scratch + sizeof(AttentionState));
  for (int32_t row = 0; row < v.rows; ++row) {
    for (int64_t i = 0; i < width; ++i) states[row * width + i] = 0.0f;
    states[row * width + kv.dv_padded] = kHidden;
  }
  const int32_t step = blocks_per_partition(kv), end = v.end_block();
  for (int32_t block = v.t.first_key / kv.block_size; block < end; block += step)
    partition<E>(v, block, block + step < end ? block + step : end, s, states);
  if (v.t.partial) return;
  for (int32_t row = 0; row < v.rows; ++row) finish(states + row * width, kv.dv, kv.dv_padded, v.output(row));
}

int64_t attention_scratch(const KvLayout& kv) {
  return static_cast<int64_t>(sizeof(AttentionState)) + kAttentionRows * partial_width(kv) * static_cast<int64_t>(sizeof(float));
}

void attend(const AttentionArgs& a, const AttentionTile& t, uint8_t* scratch) {
  const TileView v{a, t, t.num_tokens * a.group};
  switch (a.kv.kind) {
    case ElementKind::f32: return attend_kind<ElementKind::f32>(v, scratch);
    case ElementKind::bf16: return attend_kind<ElementKind::bf16>(v, scratch);
    case ElementKind::i8: return attend_kind<ElementKind::i8>(v, scratch);
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
