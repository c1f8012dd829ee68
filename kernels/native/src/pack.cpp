#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace octavo {
namespace {

constexpr int64_t kWorthThreads = 1 << 16;  // elements

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

// Nibbles: the first half of a group low and the second high, or neighbours together, even index low, in two's
// complement.
enum class Coding { bytes, halves, pairs };

// How a format stores a scale group: `bytes` each, with the scale first and the codes from `first` on.
struct Format {
  const char* name;
  WeightKind kind;
  Coding coding;
  int group;  // inputs per scale; 0: the whole row
  int bytes, first;
};

constexpr Format kFormats[] = {
    {"Q8_0", WeightKind::q8, Coding::bytes, 32, 34, 2},     {"Q4_0", WeightKind::q4, Coding::halves, 32, 18, 2},
    {"Q4_1", WeightKind::q4_min, Coding::halves, 32, 20, 4}, {"INT4_G32", WeightKind::q4, Coding::pairs, 32, 18, 2},
    {"INT4_G64", WeightKind::q4, Coding::pairs, 64, 34, 2}, {"INT4_G128", WeightKind::q4, Coding::pairs, 128, 66, 2},
    {"INT8", WeightKind::q8, Coding::bytes, 0, 0, 2},
};

const Format* find_format(const std::string& name) {
  for (const Format& f : kFormats)
    if (name == f.name) return &f;
  return nullptr;
}

bool is_float(const std::string& format) { return format == "F32" || format == "F16" || format == "BF16"; }

int64_t group_bytes(WeightKind kind) { return kind == WeightKind::q8 ? kGroup * kLanes : kGroup * kLanes / 2; }

int64_t words_per_scale(WeightKind kind) { return kind == WeightKind::q4_min ? 2 * kLanes : kLanes; }

WeightPart describe(const HostPart& host, WeightKind float_kind) {
  WeightPart p{};
  p.n = host.n;
  p.k = host.k;
  p.k_padded = padded_inputs(host.k);
  if (is_float(host.format)) {
    p.kind = float_kind;
    p.groups_per_scale = 1;
    return p;
  }
  const Format* f = find_format(host.format);
  if (!f) throw std::invalid_argument("unknown weight format '" + host.format + "'");
  p.kind = f->kind;
  p.groups_per_scale = static_cast<int32_t>(f->group ? f->group / kGroup : p.k_padded / kGroup);
  const int64_t row = f->group ? (host.k + f->group - 1) / f->group * f->bytes : 2 + host.k;
  if (host.row_bytes != row) throw std::invalid_argument("a row of format " + host.format + " has the wrong size");
  return p;
}

// body(first row, end) on whole blocks of 16 rows, shared out among threads.
template <typename Body> void for_rows(const WeightPart& p, int threads, Body body) {
  const int64_t blocks = (p.n + kLanes - 1) / kLanes;
  const int64_t share = p.n * p.k < kWorthThreads ? blocks : (blocks + threads - 1) / threads;
  std::vector<std::thread> helpers;
  for (int64_t first = share; first < blocks; first += share)
    helpers.emplace_back([=, &body] { body(first * kLanes, std::min(p.n, (first + share) * kLanes)); });
  body(0, std::min(p.n, share * kLanes));
  for (std::thread& helper : helpers) helper.join();
}

// ---- floats ---------------------------------------------------------------------------------------------------

void read_row(const HostPart& host, int64_t row, float* out) {
  const uint8_t* p = host.data + row * host.row_bytes;
  if (host.format == "F32")
    std::memcpy(out, p, static_cast<size_t>(host.k) * 4);
  else if (host.format == "F16")
    for (int64_t i = 0; i < host.k; ++i) out[i] = half_to_float(read<uint16_t>(p + 2 * i));
  else
    for (int64_t i = 0; i < host.k; ++i) out[i] = bf16_to_float(read<uint16_t>(p + 2 * i));
}

void pack_float(const HostPart& host, const WeightPart& p, uint8_t* codes, int threads) {
  for_rows(p, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(p.k));
    for (int64_t n = begin; n < end; ++n) {
      read_row(host, n, row.data());
      const int64_t base = n / kLanes * p.k_padded * kLanes, lane = n % kLanes;
      if (p.kind == WeightKind::f32) {
        auto* out = reinterpret_cast<float*>(codes) + base + lane;
        for (int64_t i = 0; i < p.k; ++i) out[i * kLanes] = row[static_cast<size_t>(i)];
      } else {
        auto* out = reinterpret_cast<uint16_t*>(codes) + base + lane * 2;
        for (int64_t i = 0; i < p.k; ++i) out[i / 2 * 2 * kLanes + i % 2] = float_to_bf16(row[static_cast<size_t>(i)]);
      }
    }
  });
}

// ---- codes ----------------------------------------------------------------------------------------------------

// The codes of a scale group, as they are stored: int8, or the unsigned nibble.
void read_codes(const Format& f, const uint8_t* group, int64_t count, uint8_t* out) {
  const uint8_t* p = group + f.first;
  if (f.coding == Coding::bytes) {
    std::memcpy(out, p, static_cast<size_t>(count));
  } else if (f.coding == Coding::halves) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(i < 16 ? p[i] & 15 : p[i - 16] >> 4);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(((i % 2 ? p[i / 2] >> 4 : p[i / 2] & 15) + 8) & 15);
  }
}

// One row's 32 codes of a group to their places; see pack.h.
void place_group(WeightKind kind, const uint8_t* codes, int64_t lane, uint8_t* group) {
  uint8_t ordered[kGroup];
  for (int i = 0; i < kGroup; ++i) ordered[i] = codes[i / 8 * 8 + kByteOrder[i % 8]];
  if (kind == WeightKind::q8) {
    for (int word = 0; word < 8; ++word) std::memcpy(group + word * 64 + lane * 4, ordered + 4 * word, 4);
    return;
  }
  for (int word = 0; word < 4; ++word)
    for (int b = 0; b < 4; ++b)
      group[word * 64 + lane * 4 + b] = static_cast<uint8_t>(ordered[8 * word + b] | ordered[8 * word + 4 + b] << 4);
}

// e such that 2^e · largest weight lies just below 2^15, the top of float16.
int32_t exponent_of(float largest) {
  if (!(largest > 0.0f) || std::isinf(largest)) return 0;
  int exponent;
  std::frexp(largest, &exponent);
  return std::min(15, std::max(-14, 15 - exponent));
}

// Rows [begin, end); gives the largest weight that their scales allow.
float pack_rows(const HostPart& host, const WeightPart& p, const Format& f, uint8_t* codes, uint8_t* scales,
                int64_t begin, int64_t end) {
  float largest = 0.0f;
  const int64_t groups = p.k_padded / kGroup, words = words_per_scale(p.kind);
  const int64_t scale_groups = (groups + p.groups_per_scale - 1) / p.groups_per_scale;
  const int64_t width = f.group ? f.group : host.k, bytes = f.group ? f.bytes : 2 + host.k;
  // Inputs past k are 0 in the activations; a q4 code of 8 stands for weight 0.
  std::vector<uint8_t> row(static_cast<size_t>(p.k_padded), p.kind == WeightKind::q4 ? 8 : 0);
  for (int64_t n = begin; n < end; ++n) {
    const int64_t lane = n % kLanes;
    uint8_t* scale = scales + n / kLanes * scale_groups * words * 2 + 2 * lane;
    const uint8_t* group = host.data + n * host.row_bytes;
    for (int64_t i = 0; i < host.k; i += width, group += bytes, scale += words * 2) {
      std::memcpy(scale, group, 2);
      float top = std::fabs(half_to_float(read<uint16_t>(group))) * (p.kind == WeightKind::q8 ? 128.0f : 15.0f);
      if (p.kind == WeightKind::q4_min) {
        std::memcpy(scale + 2 * kLanes, group + 2, 2);
        top += std::fabs(half_to_float(read<uint16_t>(group + 2)));
      }
      largest = std::max(largest, top);
      read_codes(f, group, std::min(width, host.k - i), row.data() + i);
    }
    uint8_t* block = codes + n / kLanes * groups * group_bytes(p.kind);
    for (int64_t g = 0; g < groups; ++g)
      place_group(p.kind, row.data() + g * kGroup, lane, block + g * group_bytes(p.kind));
  }
  return largest;
}

void pack_quantized(const HostPart& host, WeightPart& p, uint8_t* codes, uint8_t* scales, int threads) {
  float largest = 0.0f;
  std::mutex mutex;
  for_rows(p, threads, [&](int64_t begin, int64_t end) {
    const float top = pack_rows(host, p, *find_format(host.format), codes, scales, begin, end);
    const std::lock_guard lock(mutex);
    largest = std::max(largest, top);
  });
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

PackedWeight pack(const std::vector<HostPart>& hosts, WeightKind float_kind, std::vector<float> bias, int threads) {
  if (hosts.empty()) throw std::invalid_argument("a weight needs at least one part");
  std::vector<WeightPart> parts;
  for (const HostPart& host : hosts) {
    if (host.k != hosts[0].k) throw std::invalid_argument("the parts of a weight differ in their number of columns");
    parts.push_back(describe(host, float_kind));
  }
  PackedWeight weight = empty_weight(std::move(parts), std::move(bias));
  uint8_t* at = weight.allocate();
  for (size_t i = 0; i < hosts.size(); ++i) {
    WeightPart& part = weight.parts[i];
    const Sizes s = sizes(part);
    if (is_float(hosts[i].format))
      pack_float(hosts[i], part, at, threads);
    else
      pack_quantized(hosts[i], part, at, at + s.codes, threads);
    at += s.codes + s.scales;
  }
  share_exponent(weight);
  return weight;
}

}  // namespace octavo
