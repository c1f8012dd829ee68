// What a packed weight is, wherever its bytes lie.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "pack.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {
namespace {

constexpr int64_t kHugePage = 2 << 20;

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

int64_t group_bytes(WeightKind kind) { return kind == WeightKind::q8 ? kGroup * kLanes : kGroup * kLanes / 2; }

// Zeroed memory, on huge pages where they help.
std::unique_ptr<uint8_t, void (*)(void*)> zeroed(int64_t bytes) {
  const int64_t page = bytes >= kHugePage ? kHugePage : 4096;
  const auto size = static_cast<size_t>(round_up(bytes, page));
  std::unique_ptr<uint8_t, void (*)(void*)> memory{static_cast<uint8_t*>(std::aligned_alloc(page, size)), std::free};
  if (!memory) throw std::bad_alloc();
#if defined(__linux__)
  if (page == kHugePage) madvise(memory.get(), size, MADV_HUGEPAGE);
#endif
  std::memset(memory.get(), 0, size);
  return memory;
}

// Parts one after the other from `data` on.
void place(PackedWeight& weight, const uint8_t* data) {
  for (WeightPart& part : weight.parts) {
    const Sizes s = sizes(part);
    part.codes = data;
    part.scales = reinterpret_cast<const uint16_t*>(data + s.codes);
    data += s.codes + s.scales;
  }
}

}  // namespace

bool is_float_kind(WeightKind kind) { return kind == WeightKind::f32 || kind == WeightKind::bf16; }

int64_t padded_inputs(int64_t k) { return round_up(k, kGroup); }

Sizes sizes(const WeightPart& p) {
  const int64_t blocks = round_up(p.n, kLanes) / kLanes, groups = p.k_padded / kGroup;
  if (p.kind == WeightKind::f32) return {blocks * p.k_padded * kLanes * 4, 0};
  if (p.kind == WeightKind::bf16) return {blocks * p.k_padded * kLanes * 2, 0};
  const int64_t scale_groups = round_up(groups, p.groups_per_scale) / p.groups_per_scale;
  const int64_t words = p.kind == WeightKind::q4_min ? 2 * kLanes : kLanes;
  return {blocks * groups * group_bytes(p.kind), round_up(blocks * scale_groups * words * 2, 64)};
}

uint8_t* PackedWeight::allocate() {
  storage = zeroed(bytes);
  place(*this, storage.get());
  return storage.get();
}

float PackedWeight::activation_scale() const { return quantized() ? std::ldexp(1.0f, 112 - parts[0].exponent) : 1.0f; }

bool PackedWeight::quantized() const {
  for (const WeightPart& p : parts)
    if (!is_float_kind(p.kind)) return true;
  return false;
}

bool PackedWeight::wide() const {
  for (const WeightPart& p : parts)
    if (p.kind != WeightKind::f32) return false;
  return true;
}

PackedWeight empty_weight(std::vector<WeightPart> parts, std::vector<float> bias) {
  PackedWeight weight;
  weight.parts = std::move(parts);
  weight.bias = std::move(bias);
  weight.k = weight.parts[0].k;
  for (WeightPart& part : weight.parts) {
    part.n_offset = weight.n;
    weight.n += part.n;
    const Sizes s = sizes(part);
    weight.bytes += s.codes + s.scales;
  }
  if (!weight.bias.empty() && static_cast<int64_t>(weight.bias.size()) != weight.n)
    throw std::invalid_argument("the bias has the wrong length");
  return weight;
}

PackedWeight attach(std::vector<WeightPart> parts, std::vector<float> bias, const uint8_t* data, int64_t bytes,
                    std::shared_ptr<const void> owner) {
  if (parts.empty()) throw std::invalid_argument("a weight needs at least one part");
  for (WeightPart& part : parts) {
    const bool known = part.kind >= WeightKind::f32 && part.kind <= WeightKind::q4_min;
    if (!known || part.n < 1 || part.k < 1 || part.k != parts[0].k || part.groups_per_scale < 1)
      throw std::invalid_argument("this is no packed weight");
    part.k_padded = padded_inputs(part.k);
  }
  PackedWeight weight = empty_weight(std::move(parts), std::move(bias));
  if (weight.bytes != bytes || reinterpret_cast<uintptr_t>(data) % 64)
    throw std::invalid_argument("a packed weight of these parts has another size or place");
  weight.owner = std::move(owner);
  place(weight, data);
  return weight;
}

}  // namespace octavo
