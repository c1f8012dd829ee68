#include "cpu.h"

#include <stdexcept>
#include <vector>

#if defined(OCTAVO_X86)
#include <cpuid.h>
#endif
#if defined(OCTAVO_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

#if defined(OCTAVO_X86)
struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return {};
  return r;
}

bool bit(unsigned word, int index) { return word >> index & 1u; }

// Which register files the operating system saves: XCR0.
uint64_t saved_state() {
  if (!bit(cpuid(1, 0).c, 27)) return 0;  // OSXSAVE
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low | static_cast<uint64_t>(high) << 32;
}

bool has_avx2() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
  return (saved_state() & 0x6) == 0x6 && bit(one.c, 12) && bit(one.c, 29) && bit(seven.b, 5);  // FMA, F16C, AVX2
}

bool has_avx512() {
  const Registers seven = cpuid(7, 0);
  const bool base = bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31);  // F, DQ, BW, VL
  return has_avx2() && (saved_state() & 0xE6) == 0xE6 && base && bit(seven.c, 11);                  // VNNI
}

bool has_amx() {
  const Registers seven = cpuid(7, 0);
  const bool bf16 = bit(cpuid(7, 1).a, 5);
  const bool tiles = bit(seven.d, 22) && bit(seven.d, 24), fp16 = bit(seven.d, 23);  // AMX-BF16, AMX-TILE
  if (!has_avx512() || !bf16 || !fp16 || !tiles || (saved_state() & 0x60000) != 0x60000) return false;
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// Worst first.
std::vector<const KernelTable*> usable_tables() {
  std::vector<const KernelTable*> tables{portable_table()};
#if defined(OCTAVO_X86)
  if (has_avx2()) tables.push_back(avx2_table());
  if (has_avx512()) tables.push_back(avx512_table());
  if (has_amx()) tables.push_back(amx_table());
#endif
  return tables;
}

}  // namespace

std::string available_tables() {
  std::string names;
  for (const KernelTable* table : usable_tables()) names += (names.empty() ? "" : ", ") + std::string(table->name);
  return names;
}

const KernelTable& choose_table(const std::string& name) {
  const auto tables = usable_tables();
  if (name.empty()) return *tables.back();
  for (const KernelTable* table : tables)
    if (name == table->name) return *table;
  throw std::invalid_argument("instruction set '" + name + "' cannot run here; available: " + available_tables());
}

}  // namespace octavo
