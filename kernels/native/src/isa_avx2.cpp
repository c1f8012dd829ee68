#define OCTAVO_ISA avx2
#include "types.h"
#include "isa/simd_avx2.h"
//
#include "isa/kernels.h"

namespace octavo {

const KernelTable* avx2_table() {
  static constexpr KernelTable table = OCTAVO_ISA::make_table("avx2");
  return &table;
}

}  // namespace octavo
