// What one instruction set provides. Every function works on a range of rows or blocks and is called by many threads.
#pragma once

#include <cstddef>

#include "types.h"

namespace octavo {

struct KernelTable {
  const char* name;
  bool tiles;  // all weights but f32 ones read LinearArgs::x_bf16, none the quantised rows

  void (*leave)();  // a thread has done its share of a program

  void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*layer_norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*gated_activation)(const PointwiseArgs&, int64_t begin, int64_t end);
  void (*gated_strip)(const PointwiseArgs&, int64_t apart, int64_t begin, int64_t end);  // gate and up so far apart
  void (*activation)(const PointwiseArgs&, int64_t begin, int64_t end);
  void (*soft_cap)(const PointwiseArgs&, int64_t begin, int64_t end);
  void (*scale)(const PointwiseArgs&, int64_t begin, int64_t end);
  void (*divide)(const PointwiseArgs&, int64_t begin, int64_t end);
  void (*add)(const PointwiseArgs&, int64_t begin, int64_t end);  // out += x
  void (*add_gated)(const PointwiseArgs&, int64_t begin, int64_t end);  // out += σ(gate) · x
  void (*rope_and_store)(const RopeArgs&, int64_t begin, int64_t end);

  // columns of rows [begin, end) to 8 bits; x is the first of them
  void (*quantize)(const float* x, int64_t stride, Columns, const QuantizedRows&, int64_t begin, int64_t end);
  // with `tiles`: times scale to bf16, as LinearArgs::x_bf16 has them
  void (*to_bf16)(const float* x, int64_t stride, Columns, float scale, uint16_t* out, int64_t k, int64_t begin,
                  int64_t end);
  // row_begin is a multiple of 16: outputs of blocks of 16 columns [block_begin, block_end) for rows [row_begin, row_end)
  void (*linear)(const LinearArgs&, int64_t row_begin, int64_t row_end, int64_t block_begin, int64_t block_end);
  int64_t (*linear_scratch)(int64_t k);  // bytes of LinearArgs::scratch
  void (*embed)(const WeightPart&, int64_t row, float scale, bool accumulate, float* out);

  int64_t (*attention_scratch)(const KvLayout&);  // bytes that attend() needs
  void (*attend)(const AttentionArgs&, const AttentionTile&, uint8_t* scratch);
  // merge one row's partials in order into `out`
  void (*merge_partials)(const float* first, int64_t parts, int64_t part_stride, int32_t dv, int32_t dv_padded,
                         float* out);

  // out[i] = x[i] where bit i mod 32 of bits[i / 32] is set, else −inf
  void (*mask_row)(const uint32_t* bits, const float* x, float* out, int64_t n);
  // largest value of x[0, n), and whether any is NaN
  float (*row_max)(const float* x, int64_t n, bool* has_nan);
  // indices of values >= bound, at most `limit`; returns how many there are in all
  int64_t (*select_at_least)(const float* x, int64_t n, float bound, int32_t* out, int64_t limit);
  // Σ exp(x − shift) in float64
  double (*sum_exp)(const float* x, int64_t n, float shift);
  // first output words of Philox4x32-10 for sixteen consecutive tokens
  void (*philox)(uint64_t seed, uint32_t token, uint32_t position, uint32_t choice, uint32_t out[kLanes]);
  // argmax of x + noise among the tokens with x >= bound; `likely` is one of them
  int32_t (*gumbel_argmax)(const float* x, int64_t n, float bound, int32_t likely, uint64_t seed, uint32_t position,
                           uint32_t choice);
};

// One per translation unit of an instruction set; which are compiled depends on the processor family.
const KernelTable* portable_table();
const KernelTable* avx2_table();
const KernelTable* avx512_table();
const KernelTable* amx_table();

}  // namespace octavo
