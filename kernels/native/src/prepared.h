// Activations in the form that a weight's kernels read.
#pragma once

#include <algorithm>
#include <cstring>

#include "pack.h"
#include "table.h"

namespace octavo {

struct Matrix {
  float* data;
  int64_t rows, stride;
};

constexpr int64_t kPrepareRows = 8;  // handed to a thread at once

inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

inline int64_t blocks_of(const WeightPart& part) { return round_up(part.n, kLanes) / kLanes; }

inline int64_t blocks_of(const PackedWeight& weight) {
  int64_t blocks = 0;
  for (const WeightPart& part : weight.parts) blocks += blocks_of(part);
  return blocks;
}

// Where a weight's activations lie in a piece of scratch, and how they get there.
class Prepared {
 public:
  Prepared(const KernelTable& table, const PackedWeight& weight, int64_t rows)
      : table_(table), real_rows_(rows), rows_(round_up(std::max<int64_t>(rows, 1), kLanes)), k_(weight.k),
        k_padded_(round_up(weight.k, kGroup)), quantized_(!table.tiles && weight.quantized()),
        bf16_(table.tiles && !weight.wide()), scale_(weight.activation_scale()) {}

  size_t bytes() const {
    const int64_t groups = k_padded_ / kGroup;
    return static_cast<size_t>(quantized_ ? rows_ * (k_padded_ + 12 * groups) : bf16_ ? rows_ * k_padded_ * 2 : 0);
  }
  bool needed() const { return quantized_ || bf16_; }
  int64_t elements() const { return rows_ * k_padded_; }

  // All columns of rows [begin, end) of x.
  void fill(Matrix x, uint8_t* scratch, int64_t begin, int64_t end) const {
    fill(x.data + begin * x.stride, x.stride, {0, k_}, scratch, begin, end);
  }
  // Some columns of rows [begin, end), of which x is the first. Whoever fills the last row fills the padding.
  void fill(const float* x, int64_t stride, Columns columns, uint8_t* scratch, int64_t begin, int64_t end) const {
    if (quantized_) table_.quantize(x, stride, columns, quantized(scratch), begin, end);
    if (!bf16_) return;
    table_.to_bf16(x, stride, columns, scale_, bf16(scratch), k_, begin, end);
    if (end == real_rows_) clear_padding(columns, scratch);
  }

  LinearArgs args(const PackedWeight& weight, const WeightPart& part, Matrix x, Matrix out, uint8_t* scratch) const {
    LinearArgs a{};
    a.part = part;
    if (quantized_) a.q = quantized(scratch);
    if (bf16_) a.x_bf16 = bf16(scratch);
    a.x = x.data;
    a.x_scale = scale_;
    a.x_stride = x.stride;
    a.out = out.data;
    a.out_stride = out.stride;
    a.bias = weight.bias.empty() ? nullptr : weight.bias.data();
    return a;
  }

 private:
  QuantizedRows quantized(uint8_t* scratch) const {
    const int64_t groups = k_padded_ / kGroup;
    QuantizedRows q{};
    q.k = k_;
    q.k_padded = k_padded_;
    q.codes = reinterpret_cast<int8_t*>(scratch);
    q.scale = reinterpret_cast<float*>(scratch + rows_ * k_padded_);
    q.sum = q.scale + rows_ * groups;
    q.isum = reinterpret_cast<int32_t*>(q.sum + rows_ * groups);
    return q;
  }
  uint16_t* bf16(uint8_t* scratch) const { return reinterpret_cast<uint16_t*>(scratch); }

  // Tiles are read whole. A padding row changes no other row, but should be something.
  void clear_padding(Columns columns, uint8_t* scratch) const {
    const int64_t first = columns.first / kGroup, last = round_up(columns.first + columns.count, kGroup) / kGroup;
    for (int64_t row = real_rows_; row < rows_; ++row)
      for (int64_t s = first; s < last; ++s)
        std::memset(bf16(scratch) + (row / 16 * (k_padded_ / kGroup) + s) * 512 + row % 16 * 32, 0, 64);
  }

  const KernelTable& table_;
  int64_t real_rows_, rows_, k_, k_padded_;
  bool quantized_, bf16_;
  float scale_;
};

}  // namespace octavo
