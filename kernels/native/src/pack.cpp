#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {
namespace {

float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 1023u;
  uint32_t bits;
  if (exponent == 31)
    bits = sign | 0x7F800000u | mantissa << 13;
  else if (exponent)
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  else
    return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 0x1p-24f;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

float bf16_to_float(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (std::isnan(x)) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

template <typename T> T read(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// How a format stores a scale group: `bytes` each, with the scale first.
struct Format {
  const char* name;
  WeightKind kind;
  int group;  // inputs per scale; 0: the whole row
  int bytes;
};

constexpr Format kFormats[] = {
    {"Q8_0", WeightKind::q8, 32, 34},          {"Q4_0", WeightKind::q4, 32, 18},
    {"Q4_1", WeightKind::q4_min, 32, 20},      {"INT4_G32", WeightKind::q4, 32, 18},
    {"INT4_G64", WeightKind::q4, 64, 34},      {"INT4_G128", WeightKind::q4, 128, 66},
    {"INT8", WeightKind::q8, 0, 0},
};

const Format* find_format(const std::string& name) {
  for (const Format& f : kFormats)
    if (name == f.name) return &f;
  return nullptr;
}

bool is_float_kind(WeightKind kind) { return kind == WeightKind::f32 || kind == WeightKind::bf16; }

bool is_float(const std::string& format) { return format == "F32" || format == "F16" || format == "BF16"; }

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

int64_t group_bytes(WeightKind kind) { return kind == WeightKind::q8 ? kGroup * kLanes : kGroup * kLanes / 2; }

// Zeroed memory, on huge pages where they help.
std::unique_ptr<uint8_t, void (*)(void*)> allocate(int64_t bytes) {
  constexpr int64_t kHugePage = 2 << 20;
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

struct Sizes {
  int64_t codes, scales;  // bytes
};

Sizes sizes(const WeightPart& p) {
  const int64_t blocks = round_up(p.n, kLanes) / kLanes, groups = p.k_padded / kGroup;
  if (p.kind == WeightKind::f32) return {blocks * p.k_padded * kLanes * 4, 0};
  if (p.kind == WeightKind::bf16) return {blocks * p.k_padded * kLanes * 2, 0};
  const int64_t scale_groups = round_up(groups, p.groups_per_scale) / p.groups_per_scale;
  const int64_t words = p.kind == WeightKind::q4_min ? 2 * kLanes : kLanes;
  return {blocks * groups * group_bytes(p.kind), round_up(blocks * scale_groups * words * 2, 64)};
}

WeightPart describe(const HostPart& host, WeightKind float_kind) {
  WeightPart p{};
  p.n = host.n;
  p.k = host.k;
  p.k_padded = round_up(host.k, kGroup);
  if (is_float(host.format)) {
    p.kind = float_kind;
    p.groups_per_scale = 1;
    return p;
  }
  const Format* f = find_format(host.format);
  if (!f) throw std::invalid_argument("unknown weight format '" + host.format + "'");
  p.kind = f->kind;
  p.groups_per_scale = static_cast<int32_t>(f->group ? f->group / kGroup : p.k_padded / kGroup);
  const int64_t row = f->group ? round_up(host.k, f->group) / f->group * f->bytes : 2 + host.k;
  if (host.row_bytes != row)
    throw std::invalid_argument("a row of format " + host.format + " has the wrong size");
  return p;
}

float float_at(const HostPart& host, int64_t row, int64_t i) {
  const uint8_t* p = host.data + row * host.row_bytes;
  if (host.format == "F32") return read<float>(p + 4 * i);
  const auto word = read<uint16_t>(p + 2 * i);
  return host.format == "F16" ? half_to_float(word) : bf16_to_float(word);
}

void pack_float(const HostPart& host, const WeightPart& p, uint8_t* codes) {
  for (int64_t n = 0; n < p.n; ++n) {
    const int64_t base = n / kLanes * p.k_padded * kLanes, lane = n % kLanes;
    for (int64_t i = 0; i < p.k; ++i) {
      const float x = float_at(host, n, i);
      if (p.kind == WeightKind::f32) {
        std::memcpy(codes + 4 * (base + i * kLanes + lane), &x, 4);
      } else {
        const uint16_t word = float_to_bf16(x);
        std::memcpy(codes + 2 * (base + i / 2 * 2 * kLanes + lane * 2 + i % 2), &word, 2);
      }
    }
  }
}

// The code of input i of a scale group, as it is stored: int8, or the unsigned nibble.
uint8_t code_of(const std::string& format, const uint8_t* group, int i) {
  if (format == "Q8_0" || format == "INT8") return group[2 + i];
  if (format == "Q4_0") return i < 16 ? group[2 + i] & 15 : group[2 + i - 16] >> 4;
  if (format == "Q4_1") return i < 16 ? group[4 + i] & 15 : group[4 + i - 16] >> 4;
  const uint8_t both = group[2 + i / 2];  // INT4: even index low, two's complement
  return ((i % 2 ? both >> 4 : both & 15) + 8) & 15;
}

void put_code(const WeightPart& p, uint8_t* block, int64_t lane, int64_t i, uint8_t code) {
  constexpr int kPlace[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // the inverse of kByteOrder
  uint8_t* group = block + i / kGroup * group_bytes(p.kind);
  const int64_t at = i % kGroup / 8 * 8 + kPlace[i % 8];
  if (p.kind == WeightKind::q8) {
    group[at / 4 * 64 + lane * 4 + at % 4] = code;
  } else {
    uint8_t& both = group[at / 8 * 64 + lane * 4 + at % 4];
    both = static_cast<uint8_t>(at % 8 < 4 ? (both & 0xF0) | code : (both & 0x0F) | code << 4);
  }
}

// e such that 2^e · largest weight lies just below 2^15, the top of float16.
int32_t exponent_of(float largest) {
  if (!(largest > 0.0f) || std::isinf(largest)) return 0;
  int exponent;
  std::frexp(largest, &exponent);
  return std::min(15, std::max(-14, 15 - exponent));
}

void pack_quantized(const HostPart& host, WeightPart& p, uint8_t* codes, uint8_t* scales) {
  float largest = 0.0f;
  const Format& f = *find_format(host.format);
  const int64_t groups = p.k_padded / kGroup, words = p.kind == WeightKind::q4_min ? 2 * kLanes : kLanes;
  const int64_t scale_groups = round_up(groups, p.groups_per_scale) / p.groups_per_scale;
  const int64_t width = f.group ? f.group : host.k, bytes = f.group ? f.bytes : 2 + host.k;
  for (int64_t n = 0; n < p.n; ++n) {
    const int64_t lane = n % kLanes;
    uint8_t* block = codes + n / kLanes * groups * group_bytes(p.kind);
    uint8_t* scale = scales + n / kLanes * scale_groups * words * 2 + 2 * lane;
    const uint8_t* group = host.data + n * host.row_bytes;
    for (int64_t s = 0; s * width < host.k; ++s, group += bytes, scale += words * 2) {
      std::memcpy(scale, group, 2);
      float top = std::fabs(half_to_float(read<uint16_t>(group))) * (p.kind == WeightKind::q8 ? 128.0f : 15.0f);
      if (p.kind == WeightKind::q4_min) {
        std::memcpy(scale + 2 * kLanes, group + 2, 2);
        top += std::fabs(half_to_float(read<uint16_t>(group + 2)));
      }
      largest = std::max(largest, top);
      for (int64_t i = 0; i < width && s * width + i < host.k; ++i)
        put_code(p, block, lane, s * width + i, code_of(host.format, group, static_cast<int>(i)));
    }
    // Inputs past k are 0 in the activations; a q4 code of 8 stands for weight 0.
    if (p.kind == WeightKind::q4)
      for (int64_t i = host.k; i < p.k_padded; ++i) put_code(p, block, lane, i, 8);
  }
  p.exponent = exponent_of(largest);
}

// One exponent for all parts, the one that suits the largest.
void share_exponent(PackedWeight& weight) {
  int32_t least = 15;
  for (const WeightPart& part : weight.parts)
    if (!is_float_kind(part.kind)) least = std::min(least, part.exponent);
  for (WeightPart& part : weight.parts) part.exponent = least;
}

}  // namespace

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

PackedWeight pack(const std::vector<HostPart>& hosts, WeightKind float_kind, std::vector<float> bias) {
  if (hosts.empty()) throw std::invalid_argument("a weight needs at least one part");
  PackedWeight weight;
  weight.k = hosts[0].k;
  for (const HostPart& host : hosts) {
    if (host.k != weight.k) throw std::invalid_argument("the parts of a weight differ in their number of columns");
    WeightPart part = describe(host, float_kind);
    part.n_offset = weight.n;
    weight.n += host.n;
    const Sizes s = sizes(part);
    weight.bytes += s.codes + s.scales;
    weight.parts.push_back(part);
  }
  if (!bias.empty() && static_cast<int64_t>(bias.size()) != weight.n)
    throw std::invalid_argument("the bias has the wrong length");
  weight.bias = std::move(bias);
  weight.storage = allocate(weight.bytes);
  uint8_t* at = weight.storage.get();
  for (size_t i = 0; i < hosts.size(); ++i) {
    WeightPart& part = weight.parts[i];
    const Sizes s = sizes(part);
    part.codes = at;
    part.scales = reinterpret_cast<uint16_t*>(at + s.codes);
    if (is_float(hosts[i].format))
      pack_float(hosts[i], part, at);
    else
      pack_quantized(hosts[i], part, at, at + s.codes);
    at += s.codes + s.scales;
  }
  share_exponent(weight);
  return weight;
}

}  // namespace octavo
