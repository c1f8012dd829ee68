// All kernels of one instruction set, in this order. Include after the set's simd_*.h, with OCTAVO_ISA defined.
#pragma once

#include "../table.h"
#include "math.h"
#include "rows.h"
//
#include "attention.h"
#include "linear.h"
#include "sampling.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr KernelTable make_table(const char* name) {
  KernelTable t{};
  t.name = name;
  t.leave = [] {};
  t.rms_norm = rms_norm;
  t.layer_norm = layer_norm;
  t.gated_activation = gated_activation;
  t.gated_strip = gated_strip;
  t.activation = activation;
  t.soft_cap = soft_cap;
  t.scale = scale;
  t.divide = divide;
  t.add = add;
  t.add_gated = add_gated;
  t.rope_and_store = rope_and_store;
  t.quantize = quantize;
  t.linear = linear;
  t.linear_scratch = linear_scratch;
  t.embed = embed;
  t.attention_scratch = attention_scratch;
  t.attend = attend;
  t.merge_partials = merge_partials;
  t.mask_row = mask_row;
  t.row_max = row_max;
  t.select_at_least = select_at_least;
  t.sum_exp = sum_exp;
  t.philox = philox;
  t.gumbel_argmax = gumbel_argmax;
  return t;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
