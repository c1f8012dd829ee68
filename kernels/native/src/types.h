// Plain argument records shared by the dispatching code and the per-ISA kernels.
//
// No inline functions here: these headers are compiled with different instruction-set flags, and a function emitted by
// more than one of them could be merged into the one the machine cannot run.
#pragma once

#include <cstdint>

// Before a loop over registers: it must be unrolled whole, or the array that it walks lives in memory.
#if defined(__clang__)
#define OCTAVO_UNROLL _Pragma("clang loop unroll(full)")
#else
#define OCTAVO_UNROLL _Pragma("GCC unroll 16")
#endif

namespace octavo {

constexpr int kLanes = 16;          // outputs (or keys, or dims) that one vector covers, on every ISA
constexpr int kGroup = 32;          // activations that share one scale
constexpr int kSplitKeys = 256;     // keys of one attention partition: fixed, so results do not depend on the batch
constexpr int kAttentionRows = 128; // (token, head) rows of one attention tile, at most
constexpr int kMaxValueDim = 512;   // head sizes up to this
constexpr float kHidden = -1e30f;   // the score of a masked key

enum class Activation : int32_t { silu, gelu, gelu_tanh, relu };
enum class ElementKind : int32_t { f32, bf16, i8 };
enum class WeightKind : int32_t { f32, bf16, q8, q4, q4_min };

// Rows are (outer, inner) pairs: row r = (r / inner, r % inner), so that heads can be normalised in place.
struct Rows {
  float* data;
  int64_t outer_stride;
  int64_t inner_stride;
};

struct NormArgs {
  Rows x, out, residual;  // residual.data == nullptr: none
  int64_t inner;
  int64_t width;
  const float* weight;
  const float* bias;  // layer_norm only; may be nullptr
  float eps;
};

struct PointwiseArgs {
  const float* x;
  float* out;
  int64_t x_stride, out_stride;
  int64_t width;
  float value;  // factor or cap
  Activation activation;
  const float* gate;  // add_gated: one value per row
};

// One part of a packed matrix: rows n of equal format. See pack.h for the layouts.
struct WeightPart {
  WeightKind kind;
  int32_t groups_per_scale;
  int32_t exponent;  // quantised kinds: 2^exponent times the weight's largest value lies below 2^15
  int64_t n;         // outputs
  int64_t n_offset;  // where they start in the output row
  int64_t k;         // inputs
  int64_t k_padded;  // to whole groups
  const uint8_t* codes;
  const uint16_t* scales;
};

// Eight consecutive inputs stand in this order wherever bytes or nibbles are packed: what a 16-bit lane then meets are
// pairs of neighbours, as bf16 tiles want them. Integer sums do not care.
constexpr int kByteOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Activations quantised per row and group of 32. What belongs to a group lies in tiles of 16 rows: [rows/16][groups][16].
struct QuantizedRows {
  int8_t* codes;  // [rows padded to 16, k_padded], in kByteOrder
  float* scale;
  float* sum;     // scale · Σ codes
  int32_t* isum;  // Σ codes
  int64_t k, k_padded;
};

// Columns [first, first + count) of rows; first is a multiple of 32.
struct Columns {
  int64_t first, count;
};

struct LinearArgs {
  WeightPart part;
  QuantizedRows q;          // quantised kinds
  const float* x;           // float kinds
  const uint16_t* x_bf16;   // tile kernels: [rows/16][k_padded/32][16][32]
  float x_scale;            // what they were multiplied by
  int64_t x_stride;
  const int32_t* out_rows;  // nullptr: row r goes to row r
  float* out;               // of row and column …
  int64_t first_row, first_column;
  int64_t out_stride;
  const float* bias;        // for the whole matrix, or nullptr
  uint8_t* scratch;         // of this thread
};

struct KvLayout {
  ElementKind kind;
  int32_t block_size, lanes;  // lanes: block_size padded to 16
  int32_t kv_heads;
  int32_t d, d_padded, dv, dv_padded;
  int64_t block_bytes, layer_bytes, head_bytes;
  int64_t v_offset, k_scale_offset, v_scale_offset;  // within a head's bytes
};

struct RopeArgs {
  Rows q, k, v;
  int64_t q_heads;
  const int32_t* positions;
  const float* cos_sin;  // nullptr: no rotation
  int64_t cos_sin_stride;
  int64_t rotary;
  bool interleaved;
  KvLayout kv;
  uint8_t* cache;  // already offset to the layer
  const int64_t* slots;
};

struct AttentionArgs {
  const float* q;
  int64_t q_token, q_head;  // strides
  float* out;
  int64_t out_token, out_head;
  KvLayout kv;
  const uint8_t* cache;  // already offset to the layer
  const int32_t* tables;
  int64_t table_stride;
  int32_t group;  // query heads per KV head
  float scale;
  int32_t window;  // 0 = none
  float soft_cap;  // 0 = none
};

// A tile of queries of one sequence and KV head: rows are (token, head of the group), token-major.
struct AttentionTile {
  const int32_t* table;
  int64_t first_token;     // of the step
  int32_t first_position;  // of that token in its sequence
  int32_t num_tokens;
  int32_t kv_head;
  int32_t first_key, last_key;  // keys to walk, [first, last); first on a partition's start
  float* partial;               // nullptr: finish into `out`; else [rows][dv_padded + 2]: acc, max, sum
};

}  // namespace octavo
