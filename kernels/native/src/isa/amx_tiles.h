// AMX tile shapes. A thread keeps one configuration at a time; changing it costs some tens of nanoseconds.
#pragma once

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024, kTileElements = 512;

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

thread_local int32_t current_shapes = 0;

// Tiles 0 to 3 are sums [rows × 16 floats], 4 and 5 hold `rows` rows of `depth` bf16, 6 and 7 depth/2 rows of 16 pairs.
inline void use_tiles(int32_t rows, int32_t depth) {
  const int32_t shapes = rows << 8 | depth;
  if (current_shapes == shapes) return;
  TileConfig c{};
  c.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    c.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : depth / 2);
    c.row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 2 * depth : 64);
  }
  _tile_loadconfig(&c);
  current_shapes = shapes;
}

// The intrinsics take literal numbers only.
template <int T> inline void write_tile(float* out, int64_t stride_bytes) {
  if constexpr (T == 0) _tile_stored(0, out, stride_bytes);
  if constexpr (T == 1) _tile_stored(1, out, stride_bytes);
  if constexpr (T == 2) _tile_stored(2, out, stride_bytes);
  if constexpr (T == 3) _tile_stored(3, out, stride_bytes);
}

void leave_tiles() {
  if (current_shapes == 0) return;
  _tile_release();
  current_shapes = 0;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
