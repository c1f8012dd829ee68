#define OCTAVO_ISA avx512
#include "types.h"
#include "isa/simd_avx512.h"
//
#include "isa/kernels.h"

namespace octavo {

const KernelTable* avx512_table() {
  static constexpr KernelTable table = OCTAVO_ISA::make_table("avx512");
  return &table;
}

}  // namespace octavo
