// AMX tile shapes. A thread keeps one configuration at a time; changing it costs some tens of nanoseconds.
#pragma once

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024, kTileElements = 512;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

thread_local int32_t current_shapes = 0;

// Tiles 0 to 3 are sums [rows × 16 floats], 4 and 5 hold `rows` rows of 32 bf16, 6 and 7 sixteen pairs of rows of 16.
inline void use_tiles(int64_t rows) {
  const auto shapes = static_cast<int32_t>(least(rows, kTileRows));
  if (current_shapes == shapes) return;
  TileConfig c{};
  c.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    c.rows[tile] = static_cast<uint8_t>(tile < 6 ? shapes : 16);
    c.row_bytes[tile] = 64;
  }
  _tile_loadconfig(&c);
  current_shapes = shapes;
}

// Where a product's right-hand side lies: a tile of 32 inputs and 16 outputs.
struct TileAt {
  const uint8_t* data;
  int64_t stride;  // bytes between pairs of inputs
};

// Sums of R × C tiles over `steps` tiles of 32 inputs. Left-hand tiles of 1 KB: row tile r, step s at a + r · a_tile +
// s · 1 KB; right-hand ones at b(s, c). Sum (r, c) goes to put(r, c, tile), which gets the tile's number as a type.
template <int R, int C, typename Right, typename Put>
inline void tile_product(const uint8_t* a, int64_t a_tile, int64_t steps, Right b, Put put) {
  _tile_zero(0);
  if constexpr (C > 1) _tile_zero(1);
  if constexpr (R > 1) _tile_zero(2);
  if constexpr (R > 1 && C > 1) _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(4, a + s * kTileBytes, 64);
    const TileAt first = b(s, 0);
    _tile_loadd(6, first.data, first.stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (C > 1) {
      const TileAt second = b(s, 1);
      _tile_loadd(7, second.data, second.stride);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R > 1) {
      _tile_loadd(5, a + a_tile + s * kTileBytes, 64);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (C > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  put(0, 0, [](float* out, int64_t stride) { _tile_stored(0, out, stride); });
  if constexpr (C > 1) put(0, 1, [](float* out, int64_t stride) { _tile_stored(1, out, stride); });
  if constexpr (R > 1) put(1, 0, [](float* out, int64_t stride) { _tile_stored(2, out, stride); });
  if constexpr (R > 1 && C > 1) put(1, 1, [](float* out, int64_t stride) { _tile_stored(3, out, stride); });
}

// The same for R and C of 1 or 2 known at run time.
template <typename Right, typename Put>
inline void tile_product(int64_t r, int64_t c, const uint8_t* a, int64_t a_tile, int64_t steps, Right b, Put put) {
  if (r > 1 && c > 1) return tile_product<2, 2>(a, a_tile, steps, b, put);
  if (r > 1) return tile_product<2, 1>(a, a_tile, steps, b, put);
  if (c > 1) return tile_product<1, 2>(a, a_tile, steps, b, put);
  tile_product<1, 1>(a, a_tile, steps, b, put);
}

void leave_tiles() {
  if (current_shapes == 0) return;
  _tile_release();
  current_shapes = 0;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
