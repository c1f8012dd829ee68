#define OCTAVO_ISA portable
#include "types.h"
#include "isa/simd_portable.h"
//
#include "isa/kernels.h"

namespace octavo {

const KernelTable* portable_table() {
  static constexpr KernelTable table = OCTAVO_ISA::make_table("portable");
  return &table;
}

}  // namespace octavo
