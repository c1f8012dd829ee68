#define OCTAVO_ISA amx
#include "types.h"
#include "isa/simd_avx512.h"
//
#include "isa/kernels.h"
//
#include "isa/amx_attention.h"
#include "isa/amx_linear.h"

namespace octavo {
namespace {

constexpr KernelTable make_amx_table() {
  KernelTable t = OCTAVO_ISA::make_table("amx");
  t.tiles = true;
  t.to_bf16 = OCTAVO_ISA::amx_to_bf16;
  t.linear = OCTAVO_ISA::amx_linear;
  t.linear_scratch = OCTAVO_ISA::amx_linear_scratch;
  t.attend = OCTAVO_ISA::amx_attend;
  t.attention_scratch = OCTAVO_ISA::tile_attention_scratch;
  t.leave = OCTAVO_ISA::leave_tiles;
  return t;
}

}  // namespace

const KernelTable* amx_table() {
  static constexpr KernelTable table = make_amx_table();
  return &table;
}

}  // namespace octavo
