// Weights in the kernels' layout.
//
// A matrix [n, k] is cut into blocks of 16 outputs; a block's inputs lie one after another, so that a vector of 16
// lanes holds 16 outputs and a product streams the block once:
//   f32   [k][16]                     bf16  [k/2][16][2]
//   q8    per group of 32 inputs: [8][16][4] int8, inputs in kByteOrder
//   q4    per group of 32 inputs: [4][16][4] bytes; byte (j, lane, b) holds place 8j + b of that order in its low nibble
//         and 8j + 4 + b in its high one, as code + 8 (q4) or as the unsigned code (q4_min)
// Scales are float16: per block and scale group 16 factors, then (q4_min) 16 minima. Inputs are padded to whole groups
// with weight 0, outputs to whole blocks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "types.h"

namespace octavo {

// A part as its file holds it: rows of `row_bytes`, in one of host_formats().
struct HostPart {
  std::string format;
  const uint8_t* data;
  int64_t row_bytes;
  int64_t n, k;
};

// Of a part, in bytes.
struct Sizes {
  int64_t codes, scales;
};
Sizes sizes(const WeightPart& part);

bool is_float_kind(WeightKind kind);
int64_t padded_inputs(int64_t k);

// Raised whenever what lies at the addresses of a part changes its meaning: files of packed weights become void.
constexpr int kPackedVersion = 1;

struct PackedWeight {
  int64_t n = 0, k = 0;
  std::vector<WeightPart> parts;  // their bytes stand one after the other
  std::vector<float> bias;        // empty, or n
  std::unique_ptr<uint8_t, void (*)(void*)> storage{nullptr, nullptr};  // of the bytes, or …
  std::shared_ptr<const void> owner;                                    // … who keeps them
  int64_t bytes = 0;

  uint8_t* allocate();     // own zeroed storage, with the parts in it
  bool quantized() const;  // has a part with codes
  bool wide() const;       // is float32 altogether
  // What tile kernels multiply activations by: their expanded weights are too small by this factor.
  float activation_scale() const;
};

// Sizes and offsets of parts that agree in k; without storage.
PackedWeight empty_weight(std::vector<WeightPart> parts, std::vector<float> bias);

// `float_kind` is what F32, F16 and BF16 parts become: WeightKind::f32 or bf16. Throws std::invalid_argument on an
// unknown format or parts of different k.
PackedWeight pack(const std::vector<HostPart>& parts, WeightKind float_kind, std::vector<float> bias, int threads);

// A weight that was packed before, over bytes that lie elsewhere. Of its parts kind, groups_per_scale, exponent, n and k
// are given. Throws std::invalid_argument where the bytes cannot be those of such parts.
PackedWeight attach(std::vector<WeightPart> parts, std::vector<float> bias, const uint8_t* data, int64_t bytes,
                    std::shared_ptr<const void> owner);

}  // namespace octavo
