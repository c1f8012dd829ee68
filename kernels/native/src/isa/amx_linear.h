// Products by AMX tiles, the same instruction for one row and for many, so that a row's result never depends on how many
// there are. Activations become bf16. Quantised weights become bf16 on their way into a tile:
//
//   w = bf16(fp16(d' · code + m'))     d' = d · 2^e, m' = m · 2^e in fp16, e from the weight's largest value
//
// fp16 to bf16 is a rounding shift by three bits, which leaves the exponent 112 too low. Activations are scaled by
// 2^(112 − e) to make up for it, exactly.
#pragma once

#include "amx_tiles.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kFetchAhead = 12;  // groups
constexpr int64_t kRing = 4;  // tiles of expanded weights between the vector unit and the tile unit

inline float power_of_two(int32_t e) {
  const uint32_t bits = static_cast<uint32_t>(e + 127) << 23;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// What sums are still to be multiplied by: a float part beside quantised ones meets their scaled activations.
inline float output_scale(const LinearArgs& a) {
  return a.part.kind == WeightKind::bf16 ? 1.0f / a.x_scale : 1.0f;
}

inline int64_t panel_bytes(int64_t k) { return (k + kGroup - 1) / kGroup * kTileBytes; }

int64_t amx_linear_scratch(int64_t k) { return 4 * kTileBytes + 2 * panel_bytes(k); }

// Rows [begin, end), of which x is the first, in tiles: [rows/16][k/32][16][32].
void amx_to_bf16(const float* x, int64_t stride, Columns columns, float scale, uint16_t* out, int64_t k, int64_t begin, int64_t end) {
  const F factor = set1(scale);
  const int64_t steps = (k + kGroup - 1) / kGroup, first = columns.first / kGroup;
  for (int64_t r = begin; r < end; ++r, x += stride) {
    uint16_t* row = out + (r / kTileRows * steps + first) * kTileElements + r % kTileRows * kGroup;
    for (int64_t i = 0; i < columns.count; i += kGroup, row += kTileElements) {
      const F low = load_n(x + i, columns.count - i), high = load_n(x + i + kLanes, columns.count - i - kLanes);
      _mm512_storeu_si512(row, (__m512i)_mm512_cvtne2ps_pbh((high * factor).v, (low * factor).v));
    }
  }
}

// ---- expansion ------------------------------------------------------------------------------------------------

// 16 fp16 values, each twice, times 2^e
inline __m512h pair_scales(const uint16_t* p, __m512h power) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_mul_ph(_mm512_castsi512_ph(_mm512_or_si512(wide, _mm512_slli_epi32(wide, 16))), power);
}

inline void store_pairs(uint8_t* out, __m512h value) {
  const __m512i rounded = _mm512_add_epi16(_mm512_castph_si512(value), _mm512_set1_epi16(4));
  _mm512_store_si512(out, _mm512_and_si512(_mm512_srai_epi16(rounded, 3), _mm512_set1_epi16(static_cast<int16_t>(0x8FFF))));
}

alignas(64) constexpr uint16_t kNibbleHalves[32] = {  // 0 … 15 in fp16, twice: index bit 4 does not matter
    0,      0x3C00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700, 0x4800, 0x4880, 0x4900,
    0x4980, 0x4A00, 0x4A80, 0x4B00, 0x4B80, 0,      0x3C00, 0x4000, 0x4200, 0x4400, 0x4500,
    0x4600, 0x4700, 0x4800, 0x4880, 0x4900, 0x4980, 0x4A00, 0x4A80, 0x4B00, 0x4B80};

struct GroupScales {
  __m512h d, m;
};

template <WeightKind K> inline GroupScales group_scales(const uint16_t* scales, __m512h power) {
  const __m512h d = pair_scales(scales, power);
  if constexpr (K == WeightKind::q4_min) return {d, pair_scales(scales + kLanes, power)};
  return {d, K == WeightKind::q4 ? _mm512_mul_ph(d, _mm512_set1_ph(-8.0f)) : d};
}

// One group of 32 inputs → a tile [16 pairs][16 outputs][2].
template <WeightKind K> inline void expand_group(const uint8_t* codes, const GroupScales& s, uint8_t* tile) {
  if constexpr (K == WeightKind::q8) {
    OCTAVO_UNROLL
    for (int i = 0; i < 8; ++i) {  // bytes of a lane: inputs 0, 4, 1, 5 or 2, 6, 3, 7 of eight
      const __m512i v = _mm512_loadu_si512(codes + 64 * i);
      uint8_t* rows = tile + (i / 2 * 4 + i % 2) * 64;
      store_pairs(rows, _mm512_mul_ph(s.d, _mm512_cvtepi16_ph(_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8))));
      store_pairs(rows + 128, _mm512_mul_ph(s.d, _mm512_cvtepi16_ph(_mm512_srai_epi16(v, 8))));
    }
  } else {
    const __m512i table = _mm512_load_si512(kNibbleHalves);
    OCTAVO_UNROLL
    for (int i = 0; i < 16; ++i) {
      const __m512i v = _mm512_loadu_si512(codes + i / 4 * 64);
      const __m512i code = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, static_cast<unsigned>(i % 4 * 4)), table);
      store_pairs(tile + 64 * i, _mm512_fmadd_ph(s.d, _mm512_castsi512_ph(code), s.m));
    }
  }
}

// Weights come from memory while the vector unit is busy: ask for them in good time. Past the end is harmless.
inline void fetch(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Walks a block's groups, expanding each into the tile that `place(g)` names and telling `then(g)`.
template <WeightKind K, typename Place, typename Then>
inline void expand_block(const WeightPart& w, int64_t block, Place place, Then then) {
  const int64_t groups = w.k_padded / kGroup, per_scale = w.groups_per_scale;
  const int64_t scale_groups = (groups + per_scale - 1) / per_scale;
  const uint8_t* codes = w.codes + block * groups * code_bytes(K);
  const uint16_t* scales = w.scales + block * scale_groups * scale_words(K);
  const __m512h power = _mm512_set1_ph(static_cast<_Float16>(power_of_two(w.exponent)));
  for (int64_t g = 0; g < groups; scales += scale_words(K)) {
    const GroupScales s = group_scales<K>(scales, power);
    __builtin_prefetch(scales + kFetchAhead * scale_words(K), 0, 2);
    for (const int64_t last = g + per_scale < groups ? g + per_scale : groups; g < last; ++g) {
      fetch(codes + (g + kFetchAhead) * code_bytes(K), code_bytes(K));
      expand_group<K>(codes + g * code_bytes(K), s, place(g));
      then(g);
    }
  }
}

// ---- few rows: a tile is used as soon as it is made ------------------------------------------------------------

inline bool stores_tiles(const LinearArgs& a) { return !a.bias && !a.out_rows && output_scale(a) == 1.0f; }

// A tile of sums, `rows` of them wanted: straight to the output where it can, else by way of `sums`.
template <typename Write>
inline void store_tile(const LinearArgs& a, int64_t row, int64_t rows, bool whole, int64_t block, float* sums, Write write) {
  if (whole && stores_tiles(a) && (block + 1) * kLanes <= a.part.n)
    return write(output_at(a, row, block), a.out_stride * 4);
  write(sums, 64);
  const F scale = set1(output_scale(a));
  for (int64_t r = 0; r < rows; ++r) store_output(a, row + r, block, load(sums + 16 * r) * scale);
}

template <WeightKind K> void few_rows(const LinearArgs& a, int64_t row, int64_t rows, int64_t block) {
  const WeightPart& w = a.part;
  const int64_t steps = w.k_padded / kGroup;
  const uint16_t* x = a.x_bf16 + row / kTileRows * steps * kTileElements;
  uint8_t* ring = a.scratch;
  auto* sums = reinterpret_cast<float*>(a.scratch + kRing * kTileBytes);
  const auto multiply = [&](int64_t s, const uint8_t* tile) {
    _tile_loadd(4, x + s * kTileElements, 64);
    _tile_loadd(6, tile, 64);
    _tile_dpbf16ps(0, 4, 6);
  };
  _tile_zero(0);
  if constexpr (K == WeightKind::bf16) {
    const uint8_t* tiles = w.codes + block * steps * kTileBytes;
    for (int64_t s = 0; s < steps; ++s) multiply(s, tiles + s * kTileBytes);
  } else {
    expand_block<K>(
        w, block, [&](int64_t g) { return ring + g % kRing * kTileBytes; },
        [&](int64_t g) {
          if (g > 0) multiply(g - 1, ring + (g - 1) % kRing * kTileBytes);
        });
    multiply(steps - 1, ring + (steps - 1) % kRing * kTileBytes);
  }
  store_tile(a, row, rows, true, block, sums, [](float* out, int64_t stride) { _tile_stored(0, out, stride); });
}

// ---- many rows: two blocks are expanded once, then tiles of 32 rows and 32 outputs ------------------------------

template <WeightKind K> const uint8_t* panel(const LinearArgs& a, int64_t block, int64_t which) {
  if constexpr (K == WeightKind::bf16) return a.part.codes + block * panel_bytes(a.part.k);
  uint8_t* out = a.scratch + 4 * kTileBytes + which * panel_bytes(a.part.k);
  expand_block<K>(a.part, block, [&](int64_t g) { return out + g * kTileBytes; }, [](int64_t) {});
  return out;
}

template <WeightKind K>
void many_rows(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t block, int64_t blocks) {
  const int64_t steps = a.part.k_padded / kGroup;
  const uint8_t* const panels[2] = {panel<K>(a, block, 0), blocks > 1 ? panel<K>(a, block + 1, 1) : nullptr};
  auto* sums = reinterpret_cast<float*>(a.scratch);
  for (int64_t row = row_begin; row < row_end; row += 2 * kTileRows) {
    const auto* x = reinterpret_cast<const uint8_t*>(a.x_bf16 + row / kTileRows * steps * kTileElements);
    tile_product(
        row_end - row > kTileRows ? 2 : 1, blocks, x, steps * kTileBytes, steps,
        [&](int64_t s, int c) { return TileAt{panels[c] + s * kTileBytes, 64}; },
        [&](int64_t r, int64_t c, auto write) {
          const int64_t first = row + r * kTileRows, left = least(kTileRows, row_end - first);
          store_tile(a, first, left, left == kTileRows, block + c, sums, write);
        });
  }
}

template <WeightKind K>
void tile_blocks(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
  const int64_t rows = row_end - row_begin;
  use_tiles(rows);
  if (rows <= kTileRows)
    for (int64_t block = begin; block < end; ++block) few_rows<K>(a, row_begin, rows, block);
  else
    for (int64_t block = begin; block < end; block += 2)
      many_rows<K>(a, row_begin, row_end, block, least(2, end - block));
}

void amx_linear(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
  if (row_begin == row_end) return;
  switch (a.part.kind) {
    case WeightKind::f32: return linear_blocks<WeightKind::f32>(a, row_begin, row_end, begin, end);
    case WeightKind::bf16: return tile_blocks<WeightKind::bf16>(a, row_begin, row_end, begin, end);
    case WeightKind::q8: return tile_blocks<WeightKind::q8>(a, row_begin, row_end, begin, end);
    case WeightKind::q4: return tile_blocks<WeightKind::q4>(a, row_begin, row_end, begin, end);
    case WeightKind::q4_min: return tile_blocks<WeightKind::q4_min>(a, row_begin, row_end, begin, end);
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
