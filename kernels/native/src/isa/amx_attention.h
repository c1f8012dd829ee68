// Paged attention on tiles, for caches of bf16 and of 8 bits: scores and weighted values are tile products in bf16 with
// float sums, one row or many alike; the softmax between them is the vector unit's. Same partitions as attention.h.
#pragma once

#include "amx_tiles.h"
#include "attention.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int32_t kBandTiles = 2;                     // row tiles whose scores stay in the nearest cache
constexpr int32_t kPairs = kSplitKeys / (2 * kLanes);       // of key groups: 32 keys are one step of a product
constexpr int32_t kKeyGroups = kSplitKeys / kLanes;         // of sixteen keys, in a partition
constexpr int64_t kScoreStride = kSplitKeys + kLanes;       // floats; not a power of two, for the cache's sake
constexpr float kLog2E = 1.44269504f;

// Sixteen keys of one block, as tiles read them. Values are copied: two groups make one tile, and may lie in two blocks.
struct KeyGroup {
  const uint8_t* keys;  // [dims/2 pairs, key_stride bytes apart][16 keys][2]
  const float *key_scales, *value_scales;  // 8 bits: one per key
  int32_t first_key;
  int32_t count;  // keys that exist: what lies past them is undefined
};

struct TileScratch {
  uint8_t* queries;   // [row tiles][dims/32][16][32] bf16
  float* scores;      // [32][kScoreStride]
  uint16_t* weights;  // [2][kPairs][16 rows][32 keys] bf16
  float* fresh;       // [32][dims]
  uint8_t* keys;      // [kKeyGroups][dims/2][16][2] bf16, for 8-bit caches
  uint8_t* values;    // [kKeyGroups][8][dims][2] bf16
  float* states;      // [rows][dims + 2]
};

inline int64_t key_bytes(const KvLayout& kv) { return kv.d_padded * 32; }
inline int64_t value_bytes(const KvLayout& kv) { return kv.dv_padded * 32; }

inline TileScratch tile_scratch(const KvLayout& kv, uint8_t* base) {
  TileScratch s{};
  const auto take = [&base](int64_t bytes) {
    uint8_t* at = base;
    base += (bytes + 63) / 64 * 64;
    return at;
  };
  s.queries = take(kAttentionRows * kv.d_padded * 2);
  s.scores = reinterpret_cast<float*>(take(kBandTiles * kTileRows * kScoreStride * 4));
  s.weights = reinterpret_cast<uint16_t*>(take(kBandTiles * kPairs * kTileBytes));
  s.fresh = reinterpret_cast<float*>(take(kBandTiles * kTileRows * kv.dv_padded * 4));
  s.keys = take(kKeyGroups * key_bytes(kv));
  s.values = take(kKeyGroups * value_bytes(kv));
  s.states = reinterpret_cast<float*>(take(kAttentionRows * partial_width(kv) * 4));
  return s;
}

int64_t tile_attention_scratch(const KvLayout& kv) {
  const TileScratch s = tile_scratch(kv, nullptr);
  const int64_t tiles = reinterpret_cast<intptr_t>(s.states) + kAttentionRows * partial_width(kv) * 4;
  const int64_t vectors = attention_scratch(kv);
  return tiles > vectors ? tiles : vectors;
}

// 2^x for x up to 0 or little above, relative error 8e-5, a fiftieth of a bf16's; 2^−126 at the least. NaN stays NaN.
inline F exp2(F x) {
  const F magic = set1(12582912.0f);  // 1.5 · 2^23: the sum's low bits are round(x)
  x = max(set1(-126.0f), x);
  const F shifted = x + magic;
  const F r = x - (shifted - magic);
  F p = fma(set1(0.055088684f), r, set1(0.242604047f));
  p = fma(p, r, set1(0.693276227f));
  p = fma(p, r, set1(0.999928951f));
  return as_float(as_int(p) + shl<23>(as_int(shifted)));
}

// ---- a partition's keys and values -----------------------------------------------------------------------------

inline __m512i widen(const uint8_t* bytes) {  // 32 int8 → bf16
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(v)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(v, 1)));
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Which halves of a pair of keys exist, for pair p of a group.
inline __m512i existing(int32_t count, int32_t p) {
  return _mm512_set1_epi32(2 * p + 1 < count ? -1 : 2 * p < count ? 0xFFFF : 0);
}

template <ElementKind E>
inline const uint8_t* expand_keys(const KvLayout& kv, const uint8_t* head, int32_t lane, uint8_t* out) {
  if constexpr (E == ElementKind::bf16) return head + lane * 4;
  for (int32_t p = 0; p < kv.d_padded / 2; ++p)
    _mm512_store_si512(out + 64 * p, widen(head + (static_cast<int64_t>(p) * kv.lanes + lane) * 2));
  return out;
}

// What does not exist becomes 0: a weight of 0 would not silence a NaN there.
template <ElementKind E>
inline void copy_values(const KvLayout& kv, const uint8_t* head, int32_t lane, int32_t count, uint8_t* out) {
  constexpr int64_t element = E == ElementKind::i8 ? 1 : 2;
  const uint8_t* from = head + kv.v_offset + static_cast<int64_t>(lane / 2) * kv.dv_padded * 2 * element;
  for (int32_t p = 0; p < 8; ++p) {
    const __m512i exists = existing(count, p);
    for (int32_t i = 0; i < kv.dv_padded * 2; i += 32, from += 32 * element, out += 64)
      _mm512_store_si512(out, _mm512_and_si512(E == ElementKind::i8 ? widen(from) : _mm512_loadu_si512(from), exists));
  }
}

template <ElementKind E>
int32_t gather_groups(const TileView& v, int32_t block, int32_t end_block, const TileScratch& s, KeyGroup* groups) {
  const KvLayout& kv = v.a.kv;
  int32_t n = 0;
  for (; block < end_block; ++block) {
    const uint8_t* head = v.block(block);
    for (int32_t lane = 0; lane < kv.block_size; lane += kLanes, ++n) {
      const int32_t first_key = block * kv.block_size + lane;
      if (first_key >= v.t.last_key) break;
      KeyGroup& g = groups[n];
      g.first_key = first_key;
      g.count = static_cast<int32_t>(least(kLanes, least(kv.block_size - lane, v.t.last_key - first_key)));
      g.keys = expand_keys<E>(kv, head, lane, s.keys + n * key_bytes(kv));
      g.key_scales = reinterpret_cast<const float*>(head + kv.k_scale_offset) + lane;
      g.value_scales = reinterpret_cast<const float*>(head + kv.v_scale_offset) + lane;
      copy_values<E>(kv, head, lane, g.count, s.values + n * value_bytes(kv));
    }
  }
  if (n % 2) __builtin_memset(s.values + n * value_bytes(kv), 0, static_cast<size_t>(value_bytes(kv)));
  return n;
}

// ---- scores ---------------------------------------------------------------------------------------------------

void pack_queries(const TileView& v, uint8_t* out) {
  const KvLayout& kv = v.a.kv;
  const int32_t steps = kv.d_padded / kGroup, padded = (v.rows + 15) / 16 * 16;
  for (int32_t row = 0; row < padded; ++row) {
    uint16_t* to = reinterpret_cast<uint16_t*>(out) + row / 16 * steps * kTileElements + row % 16 * kGroup;
    const float* q = row < v.rows ? v.query(row) : nullptr;
    for (int32_t s = 0; s < steps; ++s)
      for (int32_t i = 0; i < kGroup; i += kLanes)
        store_low16(to + s * kTileElements + i, bf16_bits(q ? load_n(q + s * kGroup + i, kv.d - s * kGroup - i) : zero()));
  }
}

// Scores of `tiles` row tiles against all key groups.
void band_scores(const KvLayout& kv, const uint8_t* queries, int64_t tiles, const KeyGroup* groups, int32_t count, int64_t key_stride, float* scores) {
  const int64_t steps = kv.d_padded / kGroup;
  for (int64_t g = 0; g < count; g += 2)
    for (int64_t tile = 0; tile < tiles; tile += 2)
      tile_product(
          least(2, tiles - tile), least(2, count - g), queries + tile * steps * kTileBytes, steps * kTileBytes, steps,
          [&](int64_t s, int c) { return TileAt{groups[g + c].keys + s * 16 * key_stride, key_stride}; },
          [&](int64_t r, int64_t c, auto write) {
            write(scores + (tile + r) * kTileRows * kScoreStride + (g + c) * kLanes, kScoreStride * 4);
          });
}

// ---- softmax of one row -----------------------------------------------------------------------------------------

inline uint32_t visible(const TileView& v, const KeyGroup& g, int32_t position) {
  const int32_t last = static_cast<int32_t>(least(position - g.first_key, g.count - 1));
  if (last < 0) return 0;
  uint32_t mask = (2u << last) - 1;
  const int32_t low = v.a.window ? position - v.a.window + 1 - g.first_key : 0;
  if (low > 0) mask &= low > 15 ? 0u : ~((1u << low) - 1);
  return mask;
}

// What a score passes through before the exponential, when that is more than one factor.
template <ElementKind E> inline bool transforms(const TileView& v) {
  return E == ElementKind::i8 || v.a.soft_cap > 0.0f || v.a.scale < 0.0f;
}

template <ElementKind E> inline F transform(const TileView& v, const KeyGroup& g, F s) {
  s = s * set1(v.a.scale);
  if constexpr (E == ElementKind::i8) s = s * load(g.key_scales);
  if (v.a.soft_cap > 0.0f) s = set1(v.a.soft_cap) * tanh(s / set1(v.a.soft_cap));
  return s;
}

// The key groups of a row: hidden ones, then [first, full_begin) in part, [full_begin, full_end) whole, [full_end, last) in
// part, then hidden ones again.
struct RowView {
  int32_t first, full_begin, full_end, last;
};

inline RowView row_view(const TileView& v, const KeyGroup* groups, int32_t count, int32_t position) {
  RowView r{0, 0, 0, 0};
  const int32_t low = v.a.window ? position - v.a.window + 1 : 0;
  const auto last_key = [&](int32_t g) { return groups[g].first_key + groups[g].count - 1; };
  while (r.first < count && last_key(r.first) < low) ++r.first;
  r.full_begin = r.first;
  while (r.full_begin < count && groups[r.full_begin].first_key < low) ++r.full_begin;
  r.last = count;
  while (r.last > r.first && groups[r.last - 1].first_key > position) --r.last;
  r.full_end = r.last;
  const auto whole = [&](int32_t g) { return groups[g].count == kLanes && last_key(g) <= position; };
  while (r.full_end > r.full_begin && !whole(r.full_end - 1)) --r.full_end;
  r.full_begin = static_cast<int32_t>(least(r.full_begin, r.last));
  if (v.a.kv.block_size % kLanes) r.full_begin = r.full_end = r.last;  // blocks end in the middle of groups
  if (r.full_end < r.full_begin) r.full_end = r.full_begin;
  return r;
}

// Calls part(g, mask) or whole(g) on each group that the row sees.
template <typename Part, typename Whole>
inline void visit(const TileView& v, const KeyGroup* groups, const RowView& r, int32_t position, Part part, Whole whole) {
  for (int32_t g = r.first; g < r.full_begin; ++g) part(g, from_bits(visible(v, groups[g], position)));
  for (int32_t g = r.full_begin; g < r.full_end; ++g) whole(g);
  for (int32_t g = r.full_end; g < r.last; ++g) part(g, from_bits(visible(v, groups[g], position)));
}

// The largest of a row's scores; with a transform they are transformed in place first.
template <ElementKind E>
float row_top(const TileView& v, const KeyGroup* groups, const RowView& view, int32_t position, float* scores) {
  const bool transformed = transforms<E>(v);
  const F hidden = set1(kHidden);
  F top[2] = {hidden, hidden};
  const auto score = [&](int32_t g) {
    F s = load(scores + g * kLanes);
    if (transformed) store(scores + g * kLanes, s = transform<E>(v, groups[g], s));
    return s;
  };
  visit(v, groups, view, position, [&](int32_t g, M seen) { top[0] = max(top[0], select(seen, score(g), hidden)); },
        [&](int32_t g) { top[g % 2] = max(top[g % 2], score(g)); });
  return reduce_max(max(top[0], top[1]));
}

// Scores become weights in bf16 [pair of key groups][16 rows][32 keys]; gives their sum.
template <ElementKind E>
float weigh_row(const TileView& v, const KeyGroup* groups, int32_t count, const RowView& view, int32_t position,
                const float* scores, float top, uint16_t* weights) {
  const float factor = transforms<E>(v) ? kLog2E : v.a.scale * kLog2E;
  const F slope = set1(factor), offset = set1(-(top * factor));
  F sum[2] = {zero(), zero()};
  const auto weight = [&](int32_t g) {
    const F p = exp2(fma(load(scores + g * kLanes), slope, offset));
    sum[g % 2] = sum[g % 2] + p;
    return E == ElementKind::i8 ? p * load(groups[g].value_scales) : p;
  };
  // Outside the whole groups: hidden keys weigh nothing, whatever stands in their place.
  const auto edge = [&](int32_t g) {
    const M seen = from_bits(g < count ? visible(v, groups[g], position) : 0);
    if (!bits(seen)) return zero();
    const F p = select(seen, exp2(fma(load(scores + g * kLanes), slope, offset)), zero());
    sum[g % 2] = sum[g % 2] + p;
    return E == ElementKind::i8 ? select(seen, p * load(groups[g].value_scales), zero()) : p;
  };
  for (int32_t g = 0; g < count; g += 2, weights += kTileElements) {
    const bool first = g >= view.full_begin && g < view.full_end;
    const bool second = g + 1 >= view.full_begin && g + 1 < view.full_end;
    const F low = first ? weight(g) : edge(g), high = second ? weight(g + 1) : edge(g + 1);
    _mm512_storeu_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
  }
  return reduce_add(sum[0] + sum[1]);
}

// What a band's rows have after a partition.
struct BandSums {
  alignas(64) float top[kBandTiles * kTileRows];
  alignas(64) float sum[kBandTiles * kTileRows];
};

template <ElementKind E>
void band_softmax(const TileView& v, const KeyGroup* groups, int32_t count, int32_t first_row, int32_t rows,
                  const TileScratch& s, BandSums& b) {
  RowView views[kBandTiles * kTileRows];
  const float factor = transforms<E>(v) ? 1.0f : v.a.scale;
  for (int32_t r = 0; r < rows; ++r) {
    const int32_t position = v.position(first_row + r);
    views[r] = row_view(v, groups, count, position);
    b.top[r] = row_top<E>(v, groups, views[r], position, s.scores + r * kScoreStride);
  }
  for (int32_t r = 0; r < rows; ++r) {
    uint16_t* weights = s.weights + r / 16 * kPairs * kTileElements + r % 16 * kGroup;
    b.sum[r] = weigh_row<E>(v, groups, count, views[r], v.position(first_row + r), s.scores + r * kScoreStride,
                            b.top[r], weights);
    b.top[r] = b.top[r] <= kHidden ? kHidden : b.top[r] * factor;
  }
}

// ---- values ---------------------------------------------------------------------------------------------------

// Weighted values of `tiles` row tiles over all key groups → fresh [rows][dims].
void band_values(const KvLayout& kv, const TileScratch& s, int64_t tiles, int32_t count) {
  const int64_t stride = kv.dv_padded * 4;
  const auto* weights = reinterpret_cast<const uint8_t*>(s.weights);
  for (int64_t dim = 0; dim < kv.dv_padded; dim += 2 * kLanes)
    for (int64_t tile = 0; tile < tiles; tile += 2)
      tile_product(
          least(2, tiles - tile), kv.dv_padded - dim > kLanes ? 2 : 1, weights + tile * kPairs * kTileBytes,
          kPairs * kTileBytes, (count + 1) / 2,
          [&](int64_t step, int c) {
            return TileAt{s.values + 2 * step * value_bytes(kv) + (dim + c * kLanes) * 4, stride};
          },
          [&](int64_t r, int64_t c, auto write) {
            write(s.fresh + (tile + r) * kTileRows * kv.dv_padded + dim + c * kLanes, stride);
          });
}

// ---- the walk -------------------------------------------------------------------------------------------------

// A partition's sums folded into the rows' states, the exponentials of sixteen rows at a time.
void merge_band(const KvLayout& kv, float* states, const float* fresh, int32_t rows, const BandSums& b) {
  const int64_t width = kv.dv_padded, stride = partial_width(kv);
  for (int32_t first = 0; first < rows; first += kLanes) {
    alignas(64) float old_max[kLanes], new_max[kLanes], keep[kLanes], take[kLanes];
    const int32_t n = static_cast<int32_t>(least(kLanes, rows - first));
    for (int32_t r = 0; r < kLanes; ++r) {
      const float old = r < n ? states[(first + r) * stride + width] : 0.0f, top = r < n ? b.top[first + r] : 0.0f;
      old_max[r] = old;
      new_max[r] = old > top ? old : top;
    }
    const F largest = load(new_max);
    store(keep, exp(load(old_max) - largest));
    store(take, exp(load(b.top + first) - largest));
    for (int32_t r = 0; r < n; ++r) {
      float* state = states + (first + r) * stride;
      const float* row = fresh + (first + r) * width;
      const F k = set1(keep[r]), t = set1(take[r]);
      for (int64_t i = 0; i < width; i += kLanes) store(state + i, fma(load(row + i), t, load(state + i) * k));
      state[width] = new_max[r];
      state[width + 1] = __builtin_fmaf(b.sum[first + r], take[r], state[width + 1] * keep[r]);
    }
  }
}

template <ElementKind E>
void tile_band(const TileView& v, const KeyGroup* groups, int32_t count, int32_t first_row, const TileScratch& s) {
  const KvLayout& kv = v.a.kv;
  const int32_t rows = static_cast<int32_t>(least(kBandTiles * kTileRows, v.rows - first_row));
  const int64_t key_stride = E == ElementKind::i8 ? 64 : kv.lanes * 4;
  const uint8_t* queries = s.queries + static_cast<int64_t>(first_row / 16) * (kv.d_padded / kGroup) * kTileBytes;
  const int64_t tiles = (rows + 15) / 16;
  band_scores(kv, queries, tiles, groups, count, key_stride, s.scores);
  BandSums b;
  band_softmax<E>(v, groups, count, first_row, rows, s, b);
  band_values(kv, s, tiles, count);
  merge_band(kv, s.states + first_row * partial_width(kv), s.fresh, rows, b);
}

template <ElementKind E> void tile_attend(const TileView& v, uint8_t* scratch) {
  const KvLayout& kv = v.a.kv;
  TileScratch s = tile_scratch(kv, scratch);
  const int64_t width = partial_width(kv);
  if (v.t.partial) s.states = v.t.partial;
  for (int32_t row = 0; row < v.rows; ++row) {
    for (int64_t i = 0; i < width; ++i) s.states[row * width + i] = 0.0f;
    s.states[row * width + kv.dv_padded] = kHidden;
  }
  use_tiles(v.rows);
  pack_queries(v, s.queries);
  const int32_t step = blocks_per_partition(kv), end = v.end_block();
  for (int32_t block = v.t.first_key / kv.block_size; block < end; block += step) {
    KeyGroup groups[kKeyGroups];
    const int32_t count = gather_groups<E>(v, block, block + step < end ? block + step : end, s, groups);
    for (int32_t row = 0; row < v.rows; row += kBandTiles * kTileRows) tile_band<E>(v, groups, count, row, s);
  }
  if (v.t.partial) return;
  for (int32_t row = 0; row < v.rows; ++row) finish(s.states + row * width, kv.dv, kv.dv_padded, v.output(row));
}

void amx_attend(const AttentionArgs& a, const AttentionTile& t, uint8_t* scratch) {
  const TileView v{a, t, t.num_tokens * a.group};
  switch (a.kv.kind) {
    case ElementKind::f32: return attend(a, t, scratch);
    case ElementKind::bf16: return tile_attend<ElementKind::bf16>(v, scratch);
    case ElementKind::i8: return tile_attend<ElementKind::i8>(v, scratch);
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
