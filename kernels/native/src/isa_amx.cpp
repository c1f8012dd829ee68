#define OCTAVO_ISA amx
#include "types.h"
#include "isa/simd_avx512.h"
//
#include "isa/kernels.h"

namespace octavo {

const KernelTable* amx_table() {
  static constexpr KernelTable table = OCTAVO_ISA::make_table("amx");
  return &table;
}

}  // namespace octavo
